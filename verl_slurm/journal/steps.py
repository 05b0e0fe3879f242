"""`RUN/steps.jsonl`: the numbers of every step, append-only, one JSON object a line. The events of whole steps.

They are apart from `events.jsonl`, so that the journal of what happened to a run stays short, and reading it cheap.
Rank 0 of the trainer writes a line behind each step: `time` (UTC, ISO 8601), `run` (the id of `RUN/run_id`; a line with
another one is passed over), `attempt` and the row: the metrics of the training (the same however often a run is
interrupted), those of an evaluation (`eval/...`), and times and memory, which are not numbers of the training
(`..._s`, `..._per_second`, `communication_share`, `memory_bytes`).

A step that is done again after an interruption has a line of each attempt; the newest counts. It informs, and nothing
depends on it: it is not forced to disk, and a line that cannot be written is lost. Metrics of a checkpoint's steps are
in its own history.
"""

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec

from verl_slurm.base.bounded import TooMuch, open_regular
from verl_slurm.base.errors import UNREADABLE
from verl_slurm.base.files import append_line
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import known_run_id

StepRow = dict[str, Any]

_MOST = 4 << 20
"""Bytes that are read at most, from the end."""
_MOST_OF_ALL, _MOST_LINES = 128 << 20, 300_000
"""Bytes and lines of the whole file that are read at most, the newest; a handed-over file may have any length."""
_PIECE = 1 << 20
_LINE = 1 << 16
"""Bytes of a line; a longer one is none of ours, and reads as several that are no rows."""
_MOST_DAMAGED = 1000
_ROW = msgspec.json.Decoder(dict[str, float | int | str | bool | None])
# JSON has integers that no float can hold, and no number of a step is one.
_LARGEST = 1 << 53


def append_step(paths: RunPaths, attempt: int, row: dict[str, float]) -> None:
    """Writes one step down. Raises OSError: it was not written whole."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    # Not durable: nothing depends on it, and the training would wait for the disk at each step.
    of_run = {"time": now, "run": known_run_id(paths), "attempt": attempt}
    append_line(paths.steps, msgspec.json.encode(of_run | row), durable=False)


def last_steps(paths: RunPaths, count: int, unread: list[str] | None = None) -> list[StepRow]:
    """The newest row of each of the last `count` steps, oldest first; no file, no rows. Raises TooMuch.

    `unread` gets a sentence if rows of another run were met.
    """
    rows: list[StepRow] = []
    others = _Others(paths)
    for line in _from_the_end(paths):
        row = others.without(_parse(line))
        # From the newest on, steps fall: a line with a greater step is one that was thrown back, an equal one was done
        # again.
        if row is None or (rows and row["step"] >= rows[-1]["step"]):
            continue
        rows.append(row)
        if len(rows) == count:
            break
    others.tell(unread)
    return rows[::-1]


def every_row(
    paths: RunPaths, damaged: list[int] | None = None, unread: list[str] | None = None
) -> Iterator[StepRow]:
    """The rows of all lines in their order, those of steps done again included. No file, none. Of a file
    beyond 128 MiB or 300,000 lines, the newest are read.

    Args:
        damaged: gets the number of each line that is no row, from 1 at the first that is read; at most 1,000.
        unread: gets a sentence if the file is read in part, and one if rows are another run's.
    """
    others = _Others(paths)
    for number, line in enumerate(_lines(paths, unread if unread is not None else []), 1):
        row = _parse(line.rstrip(b"\n"))
        if row is None and damaged is not None and len(damaged) < _MOST_DAMAGED:
            damaged.append(number)
        elif (own := others.without(row)) is not None:
            yield own
    others.tell(unread)


class _Others:
    """Leaves out the rows of other runs, and counts them."""

    def __init__(self, paths: RunPaths) -> None:
        self._own, self._seen, self._named = known_run_id(paths), 0, ""

    def without(self, row: StepRow | None) -> StepRow | None:
        if row is None or not self._own or row.get("run") in (None, "", self._own):
            return row
        self._seen, self._named = self._seen + 1, str(row["run"])[:40]
        return None

    def tell(self, unread: list[str] | None) -> None:
        if self._seen and unread is not None:
            unread.append(
                f"steps.jsonl has {counted(self._seen, 'row')} of another run ({self._named}), which were passed over"
            )


def _lines(paths: RunPaths, unread: list[str]) -> Iterator[bytes]:
    try:
        with os.fdopen(open_regular(paths.steps), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = _first_to_read(file, size)
            if begin:
                unread.append(
                    f"steps.jsonl: its first {begin:,} of {size:,} bytes were not read; what is said of "
                    "steps is of the newest ones alone"
                )
            file.seek(begin)
            # In pieces: a line without an end would else fill memory. A file that grows meanwhile is read as it was.
            while begin < size and (line := file.readline(_LINE)):
                begin += len(line)
                yield line
    except FileNotFoundError:
        return
    except (OSError, TooMuch) as error:
        unread.append(f"steps.jsonl was not read: {error}")


def _first_to_read(file: BinaryIO, size: int) -> int:
    """Returns where the newest lines begin that are read."""
    begin, lines = size, 0
    while begin and size - begin < _MOST_OF_ALL:
        first = max(begin - _PIECE, size - _MOST_OF_ALL, 0)
        file.seek(first)
        piece = file.read(begin - first)
        lines += piece.count(b"\n")
        if lines > _MOST_LINES:
            # The line ends that are too many, from the front.
            end = 0
            for _ in range(lines - _MOST_LINES):
                end = piece.index(b"\n", end) + 1
            return first + end
        begin = first
    if begin:
        file.seek(begin)
        begin += len(file.readline(_LINE))
    return begin


def _from_the_end(paths: RunPaths) -> list[bytes]:
    """Whole lines of the file's last `_MOST` bytes, newest first."""
    try:
        with os.fdopen(open_regular(paths.steps), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(size - _MOST, 0)
            file.seek(start)
            lines = file.read(_MOST).split(b"\n")
    except OSError:
        return []
    # The first piece begins in the middle of a line, unless the file was read whole.
    return lines[:0:-1] if start else lines[::-1]


def _parse(line: bytes) -> StepRow | None:
    try:
        row = _ROW.decode(line) if line else {}
    except UNREADABLE:
        return None
    if any(isinstance(value, int) and abs(value) > _LARGEST for value in row.values()):
        return None
    step = row.get("step")
    return row if isinstance(step, int | float) and not isinstance(step, bool) else None
