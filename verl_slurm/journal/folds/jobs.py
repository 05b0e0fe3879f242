"""Which jobs a run has had, which one it has, how it ended, and which nodes the next one stays away from."""

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.journal.events import (
    Avoid,
    CancelAsked,
    Cluster,
    Ended,
    Event,
    Fenced,
    Restart,
    Started,
    StartOverruled,
    Submitted,
    Successor,
)


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a run has, or had last."""

    job_id: str
    cluster: Cluster
    host: str = ""
    """Where a local one was started."""
    time: str = ""
    slurm: str = ""
    """Name of its Slurm cluster; empty: not known."""
    queued_by_us: bool = False
    """By `submit` or a lead, so that its script and its output lie in RUN/logs. False: not known."""


def newest_job(events: Iterable[Event], cluster: Cluster = "slurm", host: str = "") -> Submission | None:
    """The run's newest job, by the last events of its journal; None: they name none.

    Args:
        cluster: of the job that wrote before the first of them; `host` likewise.
    """
    found: Submission | None = None
    followed: set[str] = set()
    of: dict[str, tuple[str, bool]] = {}  # by number: the Slurm cluster, and whether we queued it
    for event in events:
        number = event.job_id or ""
        # ---- which job is it about; the newest that is not followed by another counts
        if isinstance(event, Successor):
            followed.add(event.after)
        elif number in followed and not isinstance(event, Submitted):
            continue  # the last words of the job that another one follows
        # A lead says so too: a run may have been started by hand, through the sbatch template.
        if isinstance(event, Submitted | Successor | Started):
            cluster, host = event.cluster, "" if isinstance(event, Successor) else event.host
            slurm, by_us = of.get(number, ("", False))
            # Numbers come again: on another cluster, and where a cluster's begin anew.
            another = bool(slurm and event.slurm and slurm != event.slurm)
            if queued := isinstance(event, Submitted | Successor):
                followed.discard(number)
            of[number] = (event.slurm or slurm * (not queued), queued or (by_us and not another))
            if found is not None and found.job_id == number and (queued or another):
                found = None
        if number:
            slurm, by_us = of.get(number, ("", False))
            if found is None or number != found.job_id:
                found = Submission(job_id=number, cluster=cluster, host=host, time=event.time)
            found = msgspec.structs.replace(found, slurm=slurm, queued_by_us=by_us)
    return found


def has_ended(events: Iterable[Event], job_id: str) -> bool:
    """Whether the last word of this job is an end that is not a requeue."""
    last = None
    for event in events:
        if event.job_id == job_id:
            last = event
    return isinstance(last, Ended) and last.is_final


def lead_ended(events: Iterable[Event], attempt: int) -> bool:
    """Whether the lead of this attempt said that it left."""
    return any(isinstance(event, Ended | Fenced) and event.attempt == attempt for event in events)


def began_again(events: Iterable[Event], ended: Event) -> bool:
    """Whether a later job or attempt follows this end: a run may be submitted again after any end."""
    again = False
    for event in events:
        # Counted from the last such event: equal ones of an earlier job may precede it.
        if event == ended:
            again = False
        elif isinstance(event, Submitted | Successor | Started):
            again = True
    return again


def predecessor_of(events: Sequence[Event], job_id: str) -> str:
    """The job that `job_id` was queued to follow; empty: none."""
    # The last word counts: on another cluster, or before its numbers began anew, another job had this number.
    queued = (e for e in reversed(events) if isinstance(e, Submitted | Successor) and e.job_id == job_id)
    return last.after if isinstance(last := next(queued, None), Successor) else ""


def successor_of(events: Sequence[Event], job_id: str) -> str:
    """The job that follows `job_id` already; empty: none."""
    for event in reversed(events):
        if isinstance(event, Successor) and event.after == job_id:
            return event.job_id or ""
        if isinstance(event, Submitted | Successor) and event.job_id == job_id:
            return ""  # what is before is of another job of this number
    return ""


def cancel_asked(events: Sequence[Event], attempt: int | None = None) -> bool:
    """Whether `verl-slurm cancel` was the last that became of the run's newest job.

    Args:
        attempt: of this attempt instead.
    """
    for event in reversed(events):
        if isinstance(event, CancelAsked):
            return True
        if isinstance(event, Started) and event.attempt == attempt:
            return False
        if attempt is None and isinstance(event, Submitted | Successor | Started):
            return False
    return False


def what_became(events: Sequence[Event], attempt: int) -> Literal["goes on", "is cancelled", "over"]:
    """What the journal knows of an attempt's job. One that waits in the queue goes on."""
    its = [event for event in events if isinstance(event, Ended) and event.attempt == attempt]
    cancelled = cancel_asked(events, attempt)
    if any(event.is_final for event in its) or (cancelled and its):
        return "over"
    return "is cancelled" if cancelled else "goes on"


def was_queued(events: Iterable[Event], job_id: str) -> bool:
    """Whether `submit` or a lead queued this job."""
    return any(isinstance(event, Submitted | Successor) and event.job_id == job_id for event in events)


def cancelled_task(events: Iterable[Event], job_id: str) -> str:
    """The job that `verl-slurm cancel` ended, where the run did not go on since; empty: none.

    The next task of a chain starts by itself, whatever became of the one before it. One that only said that the run
    was cancelled did not go on with it: the task after that one must not, either.
    """
    job = asked = ""
    for event in events:
        match event:
            # The job that a cancel is meant for: the last one that started, but not the one that asks.
            case Started() if event.job_id != job_id:
                job = event.job_id or ""
            # Another job has started ranks since, so the run went on.
            case Restart() if event.job_id not in (asked, job_id):
                asked = ""
            # A person wants the run to go on.
            case Submitted():
                asked = ""
            case CancelAsked():
                asked = job
    return asked


def ended_cancelled(events: Iterable[Event], job_id: str, array: int) -> bool:
    """Whether the lead of that task of `array` said that it ended by a cancel."""
    its = [event for event in events if event.job_id == job_id]
    return _of_array(its, job_id, str(array)) and any(
        isinstance(event, Ended) and event.exit_code == ExitCode.CANCELLED for event in its
    )


def loop_ended_with(events: Sequence[Event], checkpoint: str, job_id: str, array: str | None) -> bool:
    """Whether this very job, or an earlier task of its array, ended well with `checkpoint`, and no new submission
    came since.

    Args:
        array: the array that `job_id` is a task of.
    """
    # From the newest: the last submission or end decides.
    for event in reversed(events):
        if isinstance(event, Submitted):
            return False
        if isinstance(event, Ended):
            well = event.exit_code == ExitCode.OK and event.checkpoint == checkpoint
            return well and (event.job_id == job_id or _of_array(events, event.job_id, array))
    return False


def _of_array(events: Iterable[Event], job_id: str | None, array: str | None) -> bool:
    return array is not None and any(
        isinstance(event, Started) and event.job_id == job_id and event.array == array for event in events
    )


def avoided_nodes(
    events: Iterable[Event], new: Collection[str], now: datetime, for_s: float
) -> tuple[str, ...]:
    """The nodes to name to Slurm, the newest first, and by name among those of one event.

    Args:
        new: nodes found out just now.
        now: with a time zone.
        for_s: how long a node stays away.
    """
    # 0 switches it off.
    nodes = dict.fromkeys(sorted(new) if for_s > 0 else ())
    for event in reversed(list(events)):
        if not isinstance(event, Avoid):
            continue
        try:
            age_s = (now - datetime.fromisoformat(event.time)).total_seconds()
        except (ValueError, TypeError):
            continue  # damaged, or without a time zone
        if age_s < for_s:
            nodes |= dict.fromkeys(sorted(event.nodes))
    return tuple(nodes)


def wanted_start(events: Sequence[Event]) -> datetime | None:
    """Returns the time at which the attempt that begins now was to start at the earliest, as the one before asked."""
    ended = next((event for event in reversed(events) if isinstance(event, Ended)), None)
    return datetime.fromisoformat(ended.next_start) if ended is not None and ended.next_start else None


def overruled_starts(events: Iterable[Event]) -> int:
    """Returns how often the scheduler started an attempt of this run later than it was asked to."""
    return sum(isinstance(event, StartOverruled) for event in events)
