"""The slow scrub of a running job: one checkpoint after the other is read back, and what rotted is set aside.

When each was read last is in the journal (`verified`, `scrubbed`), so it holds over requeues. Where the nodes have a
second copy, the damaged one is brought home at once. Nothing here may end a run: what goes wrong is written down.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime

from verl_slurm.checkpoint.catalog import list_checkpoints
from verl_slurm.checkpoint.scrub import next_due, scrub_one
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.errors import VerlSlurmError
from verl_slurm.events import read_events
from verl_slurm.fence import require_epoch
from verl_slurm.paths import RunPaths
from verl_slurm_daemon.journal import Journal

__all__ = ["last_read", "scrub_forever", "scrub_next"]

_SETTLE_S = 600.0
"""After a start there is enough to do."""


def last_read(paths: RunPaths) -> dict[str, float]:
    """Checkpoint → when it was found whole last, in seconds of the epoch, by the journal."""
    found: dict[str, float] = {}
    for event in read_events(paths):
        good = event["event"] == "verified" or (event["event"] == "scrubbed" and event.get("good") is True)
        name, when = event.get("name"), event.get("time")
        if good and isinstance(name, str) and isinstance(when, str):
            try:
                found[name] = datetime.fromisoformat(when).timestamp()
            except ValueError:
                continue
    return found


def scrub_next(
    paths: RunPaths, config: CheckpointConfig, epoch: int, now: float
) -> tuple[float, dict[str, object]]:
    """Read the next checkpoint back if one is due. Blocks; slow on purpose.

    Returns:
        Seconds until the next look, and what to journal; empty: nothing was due.
    """
    every_s = config.scrub_every_h * 3600
    due = next_due(list_checkpoints(paths), last_read(paths), now=now, every_s=every_s)
    if due.name is None or due.in_s > 0:
        return min(due.in_s, every_s), {}
    path = paths.checkpoints / due.name
    require_epoch(paths, epoch)
    one = scrub_one(path, set_aside=True, bytes_per_s=config.scrub_mb_per_s * 1e6)
    if one.gone:
        return 0.0, {}
    detail = "; ".join(str(problem) for problem in one.verdict.problems[:3])
    told: dict[str, object] = {"name": due.name, "good": one.verdict.ok, "num_bytes": one.verdict.num_bytes}
    # One that cannot be read now stays due, and is not asked for again at once.
    return 0.0 if one.verdict.ok or one.set_aside else _SETTLE_S, told | (
        {"detail": detail} if detail else {}
    )


async def scrub_forever(
    paths: RunPaths,
    config: CheckpointConfig,
    journal: Journal,
    epoch: int,
    bring_home: Callable[[str], Awaitable[bool]],
) -> None:
    """Until it is cancelled. Called by: effects, once a lead."""
    pause = min(_SETTLE_S, config.scrub_every_h * 1800)
    while config.scrub_every_h > 0:
        await asyncio.sleep(pause)  # the due time, worked out from the journal
        try:
            pause, told = await asyncio.to_thread(scrub_next, paths, config, epoch, time.time())
        except (OSError, VerlSlurmError) as error:
            pause, told = _SETTLE_S, {"good": False, "detail": str(error)}
        if told:
            journal.event("scrubbed", **told)
        if told.get("good") is False and config.local_dir:
            await bring_home("")
