"""`RUN/events.jsonl`: what happened to a run, append-only, one JSON object a line.

Written by the daemon (`verl_slurm_daemon.journal`) and, for what people ask for, by the command line. One line is one
write with O_APPEND, so the two never mix on a local disk. Every event has `time` (UTC, ISO 8601) and `event`; the
daemon's also `epoch` and `job_id`; the rest is the event's own.
"""

import os
from datetime import UTC, datetime
from typing import Any

import msgspec

from verl_slurm.errors import UNREADABLE
from verl_slurm.files import append_line
from verl_slurm.one_line import json_line
from verl_slurm.paths import RunPaths

__all__ = ["Event", "append_event", "parse_event", "read_events", "read_last_events"]

Event = dict[str, Any]


def append_event(paths: RunPaths, event: str, **fields: object) -> Event:
    """Write one event down, durably, with the present time."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    record: Event = {"time": now, "event": event, **fields}
    append_line(paths.events, json_line(record))
    return record


def parse_event(line: bytes) -> Event | None:
    """One line of the journal, or None if it is not an event."""
    try:
        event = msgspec.json.decode(line, type=dict[str, Any])
    except UNREADABLE:
        return None
    return event if isinstance(event.get("event"), str) else None


def read_events(paths: RunPaths) -> list[Event]:
    """All events, oldest first. Lines that are no events are passed over.

    A power cut or a full disk can leave half a line. The journal informs; the truth about a run is in its checkpoints
    and its ledger, which carry digests. So a damaged line must not keep a run from going on.
    """
    try:
        lines = paths.events.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [event for line in lines if line and (event := parse_event(line)) is not None]


def read_last_events(paths: RunPaths, num_bytes: int) -> tuple[list[Event], bool]:
    """The events of the journal's last `num_bytes`, oldest first, and whether those are all there are.

    Called by: submit.fleet, which looks at a thousand journals.
    """
    try:
        fd = os.open(paths.events, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return [], True
    try:
        begin = max(os.fstat(fd).st_size - num_bytes, 0)
        lines = os.pread(fd, num_bytes, begin).split(b"\n")
    finally:
        os.close(fd)
    if begin:
        del lines[0]  # begins before what was read
    return [event for line in lines if line and (event := parse_event(line)) is not None], begin == 0
