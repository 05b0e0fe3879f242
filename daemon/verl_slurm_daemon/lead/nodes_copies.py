"""Brings checkpoints home from the nodes' own disks: each node sends its parts, and the lead assembles them.

This happens at the beginning of a restart, and after a save that does not read back. A node may then hold something
newer than shared storage, which was gone, full, or damaged since. `checkpoint/store/local_copy.py` is the
specification.
"""

import asyncio
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.keys import Keyring, load_keys
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import other_run
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.store.local_copy import assemble, list_parts, local_directory, send_home, this_node
from verl_slurm.checkpoint.store.lost import parts_since
from verl_slurm.config.load import load_resolved
from verl_slurm.journal.events import SecondCopy
from verl_slurm_daemon.allocation.contract import TooFewNodes
from verl_slurm_daemon.allocation.launcher import daemon_argv
from verl_slurm_daemon.lead.attempt import Attempt


async def bring_home(attempt: Attempt, *, after: str, avoid: Collection[str] = ()) -> bool:
    """Makes every node send what shared storage lacks; returns whether anything came of it.

    `after`: the checkpoint up to which shared storage lacks nothing. `avoid`: nodes of the job that are lost.
    """
    allocation, journal, paths = attempt.allocation, attempt.journal, attempt.paths
    argv = daemon_argv(sys.executable, "bring-home", paths, attempt.number, "--after", after)
    try:
        names = (await allocation.places(avoid)).chosen
        step = await allocation.start_step(argv, names=names)
        codes = [await process.wait() for process in step]
        lines = await asyncio.to_thread(collect, paths, attempt.number, attempt.keys)
    except (OSError, TooFewNodes) as error:
        lines, codes = [f"the nodes' own disks could not be asked: {error}"], []
    for line in lines:
        journal.write(SecondCopy(line))
    if any(codes):
        journal.write(SecondCopy(f"a node could not send its part (exit {max(codes, key=abs)})"))
    return bool(lines)


def run_bring_home(root: Path, attempt: int, after: str) -> ExitCode:
    """Sends this node's parts that are newer than `after` and that shared storage lacks.

    Raises Fenced: another attempt has the run. TierError: a disk refuses. KeyRefused, PermissionRefused:
    `keys.load_keys`.
    """
    paths = RunPaths(root)
    # A node that is late must not send parts into a run that belongs to a newer attempt.
    require_attempt(paths, attempt)
    config = load_resolved(paths.run_yaml).checkpoint
    directory, keys = local_directory(config.local_dir, paths, this_node()), load_keys(config.encryption)
    oldest = checkpoint_order(after) or (-1, -1)
    for part in list_parts(directory, keys) if directory is not None else ():
        # Of a run that was here before, under the same path.
        if other := other_run(paths, part.manifest.run_id, part.manifest.digest):
            sys.stderr.write(f"{part.path} is left there: {other}\n")
            continue
        lacking = not (paths.checkpoints / part.name).exists()
        # Attempts before `parts_since` saved what the user has abandoned by naming another checkpoint.
        if part.order > oldest and lacking and part.manifest.attempt >= parts_since(paths):
            send_home(part, paths)
    return ExitCode.OK


def collect(paths: RunPaths, attempt: int, keys: Keyring | None = None) -> Sequence[str]:
    """Does the lead's part once every node has sent; returns the result, one line per checkpoint."""
    require_attempt(paths, attempt)
    lines = []
    for verdict, good, filled in assemble(paths, keys):
        if good:
            others = f"; {len(filled)} files are from the copy in quarantine" if filled else ""
            lines.append(
                f"{verdict.name}: brought home from the nodes' own disks, {verdict.num_bytes} bytes{others}"
            )
        else:
            lines.append(f"{verdict.name}: the nodes of this job do not hold it whole: {verdict.one_line()}")
    return lines


def left_behind(name: str, nodes: str) -> str:
    """Returns the message about a checkpoint that nodes outside this job hold alone, or have lost."""
    where = nodes or "other nodes"
    return f"{name} is on the disks of {where} alone, and did not come home: the run goes on without it"
