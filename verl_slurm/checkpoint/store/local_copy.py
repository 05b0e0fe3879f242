"""The second copy of each checkpoint, on the nodes' own disks: the specification and its operations.

```
LOCAL/<run>-<8 hex>/<node>/       0700. LOCAL: checkpoint.local_dir; hex: of the SHA-256 of the run directory's path
  step_000012/                    a part: the files of this node's ranks, and the manifest of the whole
  .step_000012.<nonce>.tmp/       a part that is being written; the nonce is that of the shared staging directory.
                                  With a manifest it is whole, and counts: its writer died while it removed an
                                  older part of that name
```

In a save to both media the parts are committed when every node has its own, whether or not shared storage is done by
then; rank 0 makes one manifest for both. So the parts may be all that exists of a checkpoint, beside an unfinished
staging directory on shared storage. The sweep removes that one, and the parts are copied to shared storage.

The parts of all nodes, merged, are the checkpoint. A part is written like a whole checkpoint: fsynced, manifest last,
renamed. It counts for nothing by itself. Parts that were copied to shared storage (`send_home` on each node, then
`assemble`) become a checkpoint only after every byte was verified there.
"""

import hashlib
import os
import shutil
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from verl_slurm.base import bounded
from verl_slurm.base.bounded import read_regular
from verl_slurm.base.errors import TierError, VerlSlurmError
from verl_slurm.base.files import fsync_path, private_dir, rename, require_own, require_safe_way, write_file
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.base.tree import files_below, is_missing, list_tree, open_directory
from verl_slurm.checkpoint.format.info import Verdict
from verl_slurm.checkpoint.format.manifest import checkpoint_order, render
from verl_slurm.checkpoint.format.specification import MANIFEST, STAGING_NAME, Manifest
from verl_slurm.checkpoint.store.chunks import Reading, read_checked
from verl_slurm.checkpoint.store.copies import DirectoryPlace
from verl_slurm.checkpoint.store.quarantine import fill, set_aside_copies
from verl_slurm.checkpoint.store.verify import read_manifest, verify

_NONCE_HEX = 16


@dataclass(frozen=True, kw_only=True)
class LocalPart:
    """One node's part of a checkpoint."""

    name: str
    path: Path
    manifest: Manifest

    @property
    def order(self) -> tuple[int, int]:
        return checkpoint_order(self.name) or (-1, -1)


def local_directory(base: str | None, paths: RunPaths, node: str) -> Path | None:
    """Returns the directory of `node`'s parts of this run; None if `checkpoint.local_dir` is not set."""
    if not base:
        return None
    # By the resolved path: runs of the same name in different places must not share parts, and two spellings of one
    # path must.
    root = paths.root.resolve()
    key = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]
    # By node, too: some clusters call a shared directory local.
    return Path(base) / f"{root.name}-{key}" / node


def this_node() -> str:
    """Returns Slurm's name for this node; without Slurm, its host name."""
    # Slurm's name, since the lead starts `send_home` by it; several slurmd on one machine have one host name.
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def commit_part(staging: Path, manifest: Manifest) -> LocalPart:
    """Makes a fully written staging directory the node's part, durably. Runs on one rank per node."""
    # From here on the staging directory is a whole part and counts, whatever happens to the rename.
    write_file(staging / MANIFEST, render(manifest))
    final = staging.parent / manifest.name
    if final.exists():
        # Part of a former save at the same safe point: the same state, and perhaps the last copy of it. Ours already
        # counts under its present name (`list_parts`), should the power fail meanwhile.
        # The staging directory's own name, before the older part goes: a power cut must leave one of the two.
        fsync_path(final.parent)
        drop_staging(final)
    rename(staging, final)
    return LocalPart(name=manifest.name, path=final, manifest=manifest)


def drop_staging(path: Path) -> None:
    """Removes a part or its staging directory; a missing one is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def list_parts(directory: Path, keys: Keyring | None = None) -> list[LocalPart]:
    """Lists this node's parts whose manifest verifies, and is signed if there are keys; newest first.

    One name may have two parts: see the specification.

    Raises:
        PermissionRefused: the directory, or the run's around it, is another user's, or others may write it.
    """
    if is_missing(directory):
        return []
    # Its name can be guessed, and the run would resume from its content.
    # From the root on: who can rename a directory above ours can put another one in its place.
    require_safe_way(directory.parent.parent, "checkpoint.local_dir")
    _require_ours(directory.parent)
    _require_ours(directory)
    parts = []
    names = os.listdir(directory)
    for name in names:
        staged = STAGING_NAME.fullmatch(name)
        # A staging directory with a manifest counts as well: see the specification.
        if staged is None and CHECKPOINT_NAME.fullmatch(name) is None:
            continue
        try:
            manifest = read_manifest(directory / name, keys=keys)
        except (OSError, VerlSlurmError):
            continue
        if manifest.name == (staged[1] if staged else name):
            parts.append(LocalPart(name=manifest.name, path=directory / name, manifest=manifest))
    # The attempt first: a run that was thrown back saves lower steps that are newer all the same.
    return sorted(parts, key=lambda part: (part.manifest.attempt, part.order), reverse=True)


def _require_ours(directory: Path) -> None:
    with open_directory(directory) as fd:
        require_own(
            os.fstat(fd),
            directory,
            "the place of the second copies is not ours alone",
            "set checkpoint.local_dir to a directory of your own on the nodes' disks",
        )


def part_problems(part: LocalPart) -> list[str]:
    """Reads every file of the part from its disk; returns its faults."""
    problems: list[str] = []
    with open_directory(part.path) as root:
        # The manifest names the files of all nodes; this disk has those of its own ranks.
        there = {entry.path for entry in list_tree(root) if entry.kind == "file"}
        wanted = [Reading(entry) for entry in part.manifest.files if entry.path in there]
        read_checked(
            root,
            wanted,
            on_problem=lambda path, what: problems.append(f"{path}: {what}"),
        )
    return problems


def prune_parts(directory: Path, keep: int) -> list[str]:
    """Removes leftovers of dead saves and all but the newest `keep` parts of a run; returns names. Once per node."""
    # By directory name, not by checkpoint: the same checkpoint may lie here twice, staged and final.
    kept, counts = set[str](), Counter[str]()
    for part in list_parts(directory):
        # For each run: one that was here before, under the same path, may have had more attempts than ours.
        counts[part.manifest.run_id] += 1
        if counts[part.manifest.run_id] <= keep:
            kept.add(part.path.name)
    gone = []
    for name in sorted(os.listdir(directory)):
        is_ours = CHECKPOINT_NAME.fullmatch(name) or (name.startswith(".step_") and name.endswith(".tmp"))
        # Whatever else somebody keeps here stays.
        if is_ours and name not in kept:
            drop_staging(directory / name)
            gone.append(name)
    return gone


def send_home(part: LocalPart, paths: RunPaths) -> Path:
    """Copies a part to where `assemble` looks for it, durably; on each node. TierError: a disk refuses."""
    # So nodes meet in one directory without talking, and parts of another save of the same name do not.
    nonce = (part.manifest.digest or "")[:_NONCE_HEX]
    target = paths.staging(paths.checkpoints / part.name, nonce)
    # Each on its own: `private_dir` checks the last directory of a path.
    private_dir(paths.checkpoints, inside=paths.run)
    private_dir(target, inside=paths.run)
    # A file that the manifest does not name would make the whole directory fail its verification.
    ours = {entry.path: entry for entry in part.manifest.files}
    source, home = DirectoryPlace(part.path, "the node's disk"), DirectoryPlace(target, "the run")
    failure: TierError | None = None
    for path in sorted(ours.keys() & files_below(part.path).keys()):
        # Not checked here: where the bytes are wrong, or cannot be read, another copy may have the file.
        try:
            home.put(path, ours[path], partial(source.read, path))
        except TierError as error:
            failure = failure or error
    # Several nodes write the same one, so by rename: a reader never finds half of it.
    write_file(target / MANIFEST, read_regular(part.path / MANIFEST, bounded.MANIFEST))
    if failure is not None:
        raise failure
    return target


class Assembled(NamedTuple):
    """One checkpoint whose parts came home: whether it is one now, and the files that quarantine had."""

    verdict: Verdict
    good: bool
    filled: list[str]


def assemble(paths: RunPaths, keys: Keyring | None = None) -> list[Assembled]:
    """Makes checkpoints of the parts that were copied to shared storage, if they are whole; removes the rest.

    What is damaged is filled from a copy in quarantine. With `keys`, the manifests must be signed.
    """
    results = []
    for home in sorted(paths.checkpoints.iterdir()):
        # A directory came home if its nonce is its manifest's digest. A save that is being written has a random one.
        named = STAGING_NAME.fullmatch(home.name)
        try:
            manifest = read_manifest(home) if named else None
        except (OSError, VerlSlurmError):
            continue  # the next start's sweep removes it
        if named is None or manifest is None or named[2] != (manifest.digest or "")[:_NONCE_HEX]:
            continue
        with suppress(TierError):
            DirectoryPlace(home, "the run").forget("")  # half a file of a node whose disk broke off
        name = manifest.name
        final = paths.checkpoints / name
        verdict = verify(home, name=name, keys=keys)
        filled = []
        # With a checkpoint of that name there, the parts are not needed, and nothing is worth repairing.
        if verdict.damaged and not os.path.lexists(final):
            wrong = {problem.path for problem in verdict.problems}
            copies = set_aside_copies(paths, name, read_regular(home / MANIFEST, bounded.MANIFEST))
            filled = fill(home, [entry for entry in manifest.files if entry.path in wrong], copies)
            if filled:
                verdict = verify(home, name=name, keys=keys)
        # The one that has the name stays: it is the same save, or a start has judged it already.
        good = verdict.ok and not os.path.lexists(final)
        if good:
            rename(home, final)
        else:
            # The parts on the nodes' disks are still there; they can come home again.
            drop_staging(home)
        results.append(Assembled(verdict, good, filled))
    return results
