"""Scrubs a running job slowly: reads checkpoints and frozen models back one by one, and sets damaged ones aside.

If the nodes have a second copy, a damaged checkpoint is brought home at once. No error here ends a run; errors
are recorded.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.frozen import frozen_digests
from verl_slurm.checkpoint.store.scrub import next_due, scrub_frozen, scrub_one
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.journal.events import Scrubbed
from verl_slurm.journal.files import read_history
from verl_slurm_daemon.lead.attempt import Attempt

_SETTLE_S = 600.0
"""Seconds after a start before the first scrub: the start itself has enough to do."""

_LEAST_BYTES_PER_S = 50e6
_FROZEN = "frozen/"


def scrub_next(
    paths: RunPaths, config: CheckpointConfig, attempt: int, now: float, keys: Keyring | None = None
) -> tuple[float, Scrubbed | None]:
    """Reads one checkpoint back, slowly, if it is due. Returns seconds to the next look, and what to journal."""
    every_s = config.scrub_every_h * 3600
    infos = [*list_checkpoints(paths), *_frozen(paths)]
    # The journal has the time of each last read, so the schedule survives requeues.
    due = next_due(infos, read_history(paths).judged_at, now=now, every_s=every_s)
    if due.name is None or due.in_s > 0:
        return min(due.in_s, every_s), None
    # It sets damaged ones aside, which an attempt that lost the run must not do.
    require_attempt(paths, attempt)
    # Twice as fast as they have to be, so that all get their turn.
    bytes_per_s = max(_LEAST_BYTES_PER_S, 2 * sum(info.num_bytes for info in infos) / every_s)
    if due.name.startswith(_FROZEN):
        digest = due.name.removeprefix(_FROZEN)
        one = scrub_frozen(paths, digest, set_aside=True, bytes_per_s=bytes_per_s)
    else:
        path = paths.checkpoints / due.name
        one = scrub_one(path, set_aside=True, keys=keys, bytes_per_s=bytes_per_s)
    # Retention of the living run took it in between, which is no damage.
    if one.gone:
        return 0.0, None
    detail = "; ".join(str(problem) for problem in one.verdict.problems[:3])
    told = Scrubbed(one.verdict.ok, due.name, one.verdict.num_bytes, detail)
    if one.verdict.ok or one.set_aside:
        return 0.0, told
    # A checkpoint that cannot be read now stays due, and is not tried again at once. One whose owner or
    # signature is wrong is judged: otherwise it would keep all others from their turn.
    if not any(problem.kind == "unreadable" for problem in one.verdict.problems):
        told.judged = True
    return _SETTLE_S, told


def _frozen(paths: RunPaths) -> list[CheckpointInfo]:
    """Returns the copies in RUN/frozen, to be queued after all checkpoints."""
    return [
        CheckpointInfo(kind="committed", name=_FROZEN + digest, path=paths.frozen / digest)
        for digest in frozen_digests(paths)
    ]


async def scrub_forever(attempt: Attempt, bring_home: Callable[[str], Awaitable[bool]]) -> None:
    """Scrubs until cancelled. Runs once per lead."""
    config, given = attempt.config.checkpoint, (attempt.paths, attempt.config.checkpoint, attempt.number)
    pause = min(_SETTLE_S, config.scrub_every_h * 1800)
    while config.scrub_every_h > 0:
        await asyncio.sleep(pause)  # the due time, computed from the journal
        try:
            pause, told = await asyncio.to_thread(scrub_next, *given, time.time(), attempt.keys)
        except (OSError, VerlSlurmError) as error:
            pause, told = _SETTLE_S, Scrubbed(False, detail=str(error))
        if told is None:
            continue
        attempt.journal.write(told)
        of_checkpoint = not told.name.startswith(_FROZEN)  # nodes have no copy of a frozen model
        if not told.good and of_checkpoint and config.local_dir:
            await bring_home("")
