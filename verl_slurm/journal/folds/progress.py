"""Whether a run gets anywhere: restarts, and attempts, in a row that came to nothing."""

from collections.abc import Iterable

from verl_slurm.journal.events import (
    Cause,
    Crash,
    Done,
    Event,
    Orphaned,
    Restart,
    Started,
    StartFailed,
    Submitted,
    Training,
)

__all__ = ["failed_starts", "stranger_restarts", "stuck_restarts", "unfit_starts"]


def stuck_restarts(events: Iterable[Event]) -> int:
    """How many restarts in a row, up to now, came to nothing: nothing new to show, and ended by a fault.

    A restart's `progress` is what it started from (newest verified checkpoint, rollouts in the ledger); one was
    fruitless where a later one starts from the same. Faults are crashes, a lead that was killed (`orphaned`), a
    service that could not be started again, and a time limit that came before the ranks trained. A preempted or
    requeued restart is no fault. An attempt that storage stopped is counted by `failed_starts`, a restart that met a
    stranger by `stranger_restarts`. A new submission resets the count.
    """
    return _fruitless(events)[0]


def stranger_restarts(events: Iterable[Event]) -> int:
    """The same for restarts that met a stranger among the ranks."""
    return _fruitless(events)[1]


def _fruitless(events: Iterable[Event]) -> tuple[int, int]:
    stuck, strangers, last, trained = 0, 0, None, False
    for event in events:
        match event:
            case Submitted():
                stuck, strangers, last = 0, 0, None
            case Restart(progress=progress):
                # A later restart that starts from something else proves that the ones before it came to something.
                if progress != last:
                    stuck, strangers, last = 0, 0, progress
                trained = False
            case Training():
                trained = True
            # Before the other crashes: no fault of the program's, and with a limit of its own.
            case Crash(kind="stranger"):
                strangers += 1
            # Nor is a node that is lost, and has a spare one in its place.
            case Crash(replaced=True):
                pass
            case Crash() | Orphaned():
                stuck += 1
            # Whether the ranks trained or not: a service may fail at the first request of each attempt.
            case Cause(cause="service"):
                stuck += 1
            case Cause(cause="time_limit") if not trained:
                stuck += 1
    return stuck, strangers


def unfit_starts(events: Iterable[Event]) -> int:
    """How many attempts in a row, up to now, ended before any training because a node failed a check."""
    unfit = 0
    for event in events:
        match event:
            case Submitted() | Training():
                unfit = 0
            case Cause(cause="bad_node"):
                unfit += 1
    return unfit


def failed_starts(events: Iterable[Event], job_id: str, requeues: int) -> int:
    """How many attempts before this one could not begin, in a row.

    One that could write to the journal says so. One that could not is missed there, but Slurm has counted it.

    Args:
        requeues: how often Slurm has requeued the job.
    """
    failed, last = 0, -1
    for event in events:
        match event:
            case Submitted() | Restart() | Done():
                failed = 0
            case StartFailed():
                failed += 1
            case Started() if event.job_id == job_id:
                last = event.requeues
    # Requeues beyond the last start that could write: attempts whose storage took not even an event.
    return failed + max(requeues - last - 1, 0)
