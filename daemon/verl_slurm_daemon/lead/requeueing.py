"""Asks for another attempt of the job until there is an answer that counts, and has it stay away from bad nodes."""

import asyncio
import contextlib
from datetime import UTC, datetime

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import DaemonConfig
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import read_events
from verl_slurm.journal.folds.avoided import avoided_nodes
from verl_slurm_daemon.allocation.contract import Allocation
from verl_slurm_daemon.decide.inputs import RequeueAnswered
from verl_slurm_daemon.journal import Journal

__all__ = ["requeue"]

_ASK_AGAIN_S = 1.0
_AVOID_S = 3.0


async def requeue(
    allocation: Allocation,
    config: DaemonConfig,
    paths: RunPaths,
    journal: Journal,
    avoid: tuple[str, ...],
    delay_s: int | None = None,
) -> RequeueAnswered:
    """Slurm's final word.

    While Slurm is away or says nothing that counts, this job stays: leaving would end it for good, and staying costs
    what is left of the grace time at most. Slurm's KILL ends the loop.
    """
    while isinstance(answer := await allocation.requeue(delay_s), str):
        journal.write(ev.Requeue(False, answer))
        await asyncio.sleep(_ASK_AGAIN_S)
    accepted = answer.exit_code is ExitCode.REQUEUED
    journal.write(ev.Requeue(accepted, answer.detail))
    if accepted:
        with contextlib.suppress(OSError):  # the journal cannot be read: then nothing is avoided
            await _avoid(allocation, config, paths, journal, avoid)
    return answer


async def _avoid(
    allocation: Allocation, config: DaemonConfig, paths: RunPaths, journal: Journal, new: tuple[str, ...]
) -> None:
    """Name to Slurm the nodes that failed us lately; once there were some, also that there are none any more."""
    events = read_events(paths)
    if not new and not any(isinstance(event, ev.Avoid) for event in events):
        return
    nodes = avoided_nodes(events, new, datetime.now(UTC), config.avoid_node_s)
    said = f"nothing is avoided: no answer in {_AVOID_S:.0f} s"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(
            _AVOID_S
        ):  # the requeue is taken, and its delay runs: what waits is the way out
            said = await allocation.avoid(nodes)
    if said:
        journal.write(ev.Avoid(list(new), said))
