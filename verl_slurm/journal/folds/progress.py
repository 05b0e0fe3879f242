"""Whether a run gets anywhere: restarts, and attempts, in a row that came to nothing."""

from collections.abc import Iterable, Sequence

from verl_slurm.journal.events import (
    Cause,
    Crash,
    Done,
    Event,
    FirstRollout,
    Held,
    Orphaned,
    Restart,
    Started,
    StartFailed,
    Submitted,
    Training,
    Verified,
)

_LAST_LINES, _MOST_OF_LINE = 3, 300


def has_trained(events: Iterable[Event]) -> bool:
    """Returns whether the ranks of any attempt have trained: all that their start needs was there."""
    return any(isinstance(event, Training | FirstRollout | Verified) for event in events)


def stuck_restarts(events: Iterable[Event]) -> int:
    """How many restarts in a row, up to now, came to nothing: nothing new to show, and ended by a fault.

    A restart's `progress` is what it started from (newest verified checkpoint, rollouts in the ledger); one was
    fruitless where a later one starts from the same. Faults are crashes, a lead that was killed (`orphaned`), and a
    service that could not be started again. A preempted or requeued restart is no fault. What the environment stopped
    has counts of its own: storage and Slurm (`failed_starts`), a time limit (`short_starts`), a stranger
    (`stranger_restarts`). A new submission resets the count.
    """
    return _fruitless(events)[0]


def no_progress(events: Sequence[Event], stuck: int, command: str) -> str:
    """Returns the reason of an end after `stuck` such restarts: the last fault in its own words, and what shows more.

    Args:
        command: for people.
    """
    words = ""
    for event in reversed(events):
        if isinstance(event, Crash | Orphaned):
            words = event.detail
        elif isinstance(event, Cause) and event.cause == "service":
            words = event.evidence
        if words:
            break
    said = " / ".join(line.strip()[:_MOST_OF_LINE] for line in words.splitlines()[-_LAST_LINES:])
    last = f"; the last one: {said}" if said else ""
    return f"{stuck} restarts in a row crashed without anything new{last}; {command} shows more"


def stranger_restarts(events: Iterable[Event]) -> int:
    """The same for restarts that met a stranger among the ranks."""
    return _fruitless(events)[1]


def short_starts(events: Iterable[Event]) -> int:
    """The same for attempts that reached the job's time limit before their ranks trained. A job that was held for it,
    and released, begins to count anew.
    """
    return _fruitless(events)[2]


def _fruitless(events: Iterable[Event]) -> tuple[int, int, int]:
    stuck, strangers, short, last, trained = 0, 0, 0, None, False
    for event in events:
        match event:
            case Submitted():
                stuck, strangers, short, last = 0, 0, 0, None
            case Held():
                short = 0
            case Restart(progress=progress):
                # A later restart that starts from something else proves that the ones before it came to something.
                if progress != last:
                    stuck, strangers, short, last = 0, 0, 0, progress
                trained = False
            case Training():
                trained = True
            # Before the other crashes: no fault of the program's, and with a limit of its own.
            case Crash(kind="stranger"):
                strangers += 1
            # Nor is a node that is lost, and has a spare one in its place; nor storage that failed a rank, or a Slurm
            # that was away.
            case Crash(replaced=True) | Crash(kind="environment"):
                pass
            case Crash() | Orphaned():
                stuck += 1
            # Whether the ranks trained or not: a service may fail at the first request of each attempt.
            case Cause(cause="service"):
                stuck += 1
            case Cause(cause="time_limit") if not trained:
                short += 1
    return stuck, strangers, short


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
    """How many attempts before this one storage or Slurm stopped, in a row, with nothing new in between.

    One that could write to the journal says so. One that could not is missed there, but Slurm has counted it. A job
    that was held for it, and released, begins to count anew.

    Args:
        requeues: how often Slurm has requeued the job.
    """
    failed, last, progress = 0, -1, None
    for event in events:
        match event:
            case Submitted() | FirstRollout() | Verified() | Done() | Held():
                failed = 0
            # Not each restart: ranks may start, and meet the storage that fails before anything new is done.
            case Restart() if event.progress != progress:
                failed, progress = 0, event.progress
            case StartFailed():
                failed += 1
            case Started() if event.job_id == job_id:
                last = event.requeues
    # Requeues beyond the last start that could write: attempts whose storage took not even an event.
    return failed + max(requeues - last - 1, 0)
