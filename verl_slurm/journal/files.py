"""Reads and appends `RUN/events.jsonl`. `events.py` specifies what is in it.

The daemon appends, and the command line for what people ask for. One line is one write with O_APPEND, so the two never
mix on a local disk. Each line has the run's id. Readers get one `Foreign` in place of lines with another id.
"""

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar, Union

import msgspec

from verl_slurm.base.bounded import JOURNAL, RECORD, TooMuch, check_json, named, open_regular
from verl_slurm.base.errors import UNREADABLE
from verl_slurm.base.files import append_line
from verl_slurm.base.one_line import counted, json_line
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import known_run_id
from verl_slurm.journal.events import KINDS, Event, Foreign, Other, kind_of
from verl_slurm.journal.history import History

E = TypeVar("E", bound=Event)

# A line of two bytes takes as long to refuse as an event to read, so 32 MiB of those would take two minutes.
_MOST_LINES = 300_000
"""Of a journal, from its end: twice the events that 32 MiB hold."""
_NEWS_BYTES, _NEWS_LINES = 4 << 20, 30_000
"""Of what a follower has not seen yet, from its end."""
_OF_ANY = frozenset({"event", "time", "run", "attempt", "job_id"})


def now() -> str:
    """UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def append_event(paths: RunPaths, event: E) -> E:
    """Writes `event` down, durably, with the run's id, and the present time where it has none; returns it so.

    Raises OSError.
    """
    stamped = msgspec.structs.replace(event, time=event.time or now(), run=known_run_id(paths))
    append_line(paths.events, json_line(to_json(stamped)))
    return stamped


def to_json(event: Event) -> dict[str, Any]:
    """The object of the event's line; of an event that is read, without what this version does not know."""
    if isinstance(event, Other):
        return {"event": event.kind, **_of_any(event), **event.fields}
    own = {key: value for key, value in msgspec.to_builtins(event).items() if key not in _OF_ANY}
    return {"event": kind_of(event), **_of_any(event), **own}


def _of_any(event: Event) -> dict[str, Any]:
    found = {"time": event.time, "run": event.run, "attempt": event.attempt, "job_id": event.job_id}
    return {key: value for key, value in found.items() if value not in ("", None)}


def parse_event(line: bytes) -> Event | None:
    """One line of the journal, or None if it is not an event."""
    try:
        # First: values are counted before any becomes an object, which takes many times the memory of its text.
        check_json(line, RECORD)
    except TooMuch:
        return None
    try:
        return _KNOWN.decode(line)
    except UNREADABLE:
        pass
    try:
        fields = _ANY.decode(line)
    except UNREADABLE:
        return None
    kind = fields.get("event")
    if not isinstance(kind, str):
        return None
    time, run, attempt, job_id = (fields.get(name) for name in ("time", "run", "attempt", "job_id"))
    return Other(
        kind,
        {key: value for key, value in fields.items() if key not in _OF_ANY},
        time=time if isinstance(time, str) else "",
        run=run if isinstance(run, str) else "",
        # `type(..) is`, because isinstance takes True for an int.
        attempt=attempt if type(attempt) is int else None,
        job_id=job_id if isinstance(job_id, str) else None,
    )


_KNOWN: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Union[tuple(KINDS.values())])  # noqa: UP007
_ANY = msgspec.json.Decoder(dict[str, Any])


def read_events(paths: RunPaths, damaged: list[bytes] | None = None) -> list[Event]:
    """All events, oldest first. Lines that are none are passed over, into `damaged`. Of a journal of more
    than 32 MiB (some 150,000 events) or 300,000 lines, the newest are read.

    Raises TooMuch: something else than a journal has its name.
    """
    return read_last_events(paths, JOURNAL.num_bytes, damaged)[0]


def read_history(paths: RunPaths) -> History:
    """Returns what all events add up to. Raises as `read_events`."""
    return History(read_events(paths))


def read_last_events(
    paths: RunPaths, num_bytes: int, damaged: list[bytes] | None = None
) -> tuple[list[Event], bool]:
    """The events of the journal's last `num_bytes`, oldest first, and whether those are all that it has to give."""
    try:
        fd = open_regular(paths.events)
    except FileNotFoundError:
        return [], True
    try:
        num_bytes = min(num_bytes, JOURNAL.num_bytes)
        with named(paths.events):
            begin = max(os.fstat(fd).st_size - num_bytes, 0)
            # One read of what was there: the lead may append meanwhile.
            data = os.pread(fd, num_bytes, begin)
    finally:
        os.close(fd)
    if begin and len(data) == JOURNAL.num_bytes and b"\n" not in data:
        with named(paths.events):
            raise TooMuch("no line ends in its last 32 MiB")
    events, all_read = _newest(paths, data, len(data), _MOST_LINES, whole=begin == 0, damaged=damaged)
    return events, not all_read or begin == 0 or num_bytes == JOURNAL.num_bytes


def read_events_after(paths: RunPaths, offset: int, *, newest: bool = True) -> tuple[list[Event], int]:
    """The events of the finished lines after `offset` bytes, oldest first, and the offset after them.

    Args:
        newest: of more than 4 MiB or 30,000 lines, the newest. Otherwise the first ones, and the next call
            goes on.

    Raises FileNotFoundError: there is no journal. TooMuch: something else than a file has its name.
    """
    # A part of which no event has to be left out: the shortest ones have 60 bytes.
    fd, num_bytes = open_regular(paths.events), _NEWS_BYTES if newest else _NEWS_BYTES // 4
    try:
        with named(paths.events):
            # The newest: who follows many runs must not be held up by one.
            begin = max(os.fstat(fd).st_size - num_bytes, offset) if newest else offset
            data = os.pread(fd, num_bytes, begin)
    finally:
        os.close(fd)
    end = data.rfind(b"\n")
    if end < 0:
        # No event is as long as all that is read.
        return [], begin + len(data) if len(data) == num_bytes else offset
    return _newest(paths, data, end, _NEWS_LINES, whole=begin == offset)[0], begin + end + 1


def _newest(
    paths: RunPaths,
    data: bytes,
    end: int,
    most_lines: int,
    *,
    whole: bool,
    damaged: list[bytes] | None = None,
) -> tuple[list[Event], bool]:
    """The events of the lines before `end`, oldest first, and whether no line was left out."""
    found: list[Event] = []
    left, own = JOURNAL.num_values, known_run_id(paths)
    for number, line in enumerate(_lines_backwards(data, end, whole=whole)):
        left -= line.count(b",") + line.count(b"[") + line.count(b"{")
        # Of lines that would take too much memory or time, the older ones are left out.
        if left < 0 or number == most_lines:
            return found[::-1], False
        if line and (event := parse_event(line)) is not None:
            if not own or event.run in ("", own):
                found.append(event)
            elif found and isinstance(last := found[-1], Foreign) and last.run == event.run:
                found[-1] = _foreign(paths, event.run, own, last.lines + 1)
            else:
                found.append(_foreign(paths, event.run, own, 1))
        # A power cut or a full disk can leave half a line, which must not keep a run from going on.
        elif damaged is not None and line.strip():
            damaged.append(line)
    return found[::-1], True


def _foreign(paths: RunPaths, run: str, own: str, lines: int) -> Foreign:
    text = (
        f"{paths.events} has {counted(lines, 'line')} of run {run[:40]}, not of this run ({own}): nothing in them "
        "counts, and what this run had in their place is lost, unless its own file is put back from a backup while "
        "no job of it lives"
    )
    return Foreign("journal", text, run=run, lines=lines)


def _lines_backwards(data: bytes, end: int, *, whole: bool) -> Iterator[bytes]:
    """The lines of `data` before `end`, newest first; the oldest only if it begins in `data` (`whole`)."""
    # One at a time: a list of very short lines takes 20 times the memory of `data`.
    while (begin := data.rfind(b"\n", 0, end)) >= 0:
        yield data[begin + 1 : end]
        end = begin
    if whole:
        yield data[:end]
