"""`RUN/events.jsonl`: what happened to a run, append-only, one JSON object a line.

Written by the daemon (`verl_slurm_daemon.journal`) and, for what people ask for, by the command line. One line is one
write with O_APPEND, so the two never mix on a local disk. Every event has `time` (UTC, ISO 8601) and `event`; the
daemon's also `epoch` and `job_id`; the rest is the event's own.
"""

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from verl_slurm.bounded import JOURNAL, RECORD, TooMuch, decode_json, open_regular
from verl_slurm.errors import UNREADABLE
from verl_slurm.files import append_line
from verl_slurm.one_line import json_line
from verl_slurm.paths import RunPaths

__all__ = ["Event", "append_event", "parse_event", "read_events", "read_last_events"]

Event = dict[str, Any]

_MOST_LINES = 300_000
"""Of a journal, from its end: twice the events that 32 MiB hold. A line of two bytes takes as long to refuse as an
event to read, so 32 MiB of those would take two minutes."""


def append_event(paths: RunPaths, event: str, **fields: object) -> Event:
    """Write one event down, durably, with the present time."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    record: Event = {"time": now, "event": event, **fields}
    append_line(paths.events, json_line(record))
    return record


def parse_event(line: bytes) -> Event | None:
    """One line of the journal, or None if it is not an event."""
    try:
        event = decode_json(line, dict[str, Any], RECORD, doubles=False)
    except UNREADABLE:
        return None
    return event if isinstance(event.get("event"), str) else None


def read_events(paths: RunPaths) -> list[Event]:
    """All events, oldest first. Lines that are no events are passed over.

    A power cut or a full disk can leave half a line. The journal informs; the truth about a run is in its checkpoints
    and its ledger, which carry digests. So a damaged line must not keep a run from going on. Of a journal of more than
    32 MiB (some 150,000 events) or 300,000 lines, the newest are read.
    """
    return read_last_events(paths, JOURNAL.num_bytes)[0]


def read_last_events(paths: RunPaths, num_bytes: int) -> tuple[list[Event], bool]:
    """The events of the journal's last `num_bytes`, oldest first, and whether those are all that can be had.

    Called by: submit.fleet, which looks at a thousand journals.
    """
    try:
        fd = open_regular(paths.events)
    except (FileNotFoundError, TooMuch):
        return [], True
    try:
        num_bytes = min(num_bytes, JOURNAL.num_bytes)
        begin = max(os.fstat(fd).st_size - num_bytes, 0)
        data = os.pread(fd, num_bytes, begin)
    finally:
        os.close(fd)
    found: list[Event] = []
    left = JOURNAL.num_values
    # The newest first: of lines that would take too much memory or time, the older ones are left out.
    for number, line in enumerate(_lines_backwards(data, whole=begin == 0)):
        left -= line.count(b",") + line.count(b"[") + line.count(b"{")
        if left < 0 or number == _MOST_LINES:
            return found[::-1], True
        if line and (event := parse_event(line)) is not None:
            found.append(event)
    return found[::-1], begin == 0 or num_bytes == JOURNAL.num_bytes


def _lines_backwards(data: bytes, *, whole: bool) -> Iterator[bytes]:
    """The lines of `data`, newest first, one at a time: a list of very short ones takes 20 times the memory of `data`.

    Args:
        whole: the first line begins in `data`; otherwise it is left out.
    """
    end = len(data)
    while (begin := data.rfind(b"\n", 0, end)) >= 0:
        yield data[begin + 1 : end]
        end = begin
    if whole:
        yield data[:end]
