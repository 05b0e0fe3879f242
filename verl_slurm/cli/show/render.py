"""Prints plain lines, one JSON value, a table, or a bar. ruff (T20) refuses `print` in all other modules.

Text from outside (names, log lines, Slurm's words) is made harmless first.
"""

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO

import click

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.one_line import json_line, printable, span as span
from verl_slurm.base.shipped import with_places

_NO_TERMINAL = 240
_LEAST = 8
GAP = 2
"""Blanks between the columns of a table."""
_BLOCKS = " ▏▎▍▌▋▊▉█"
_ERASE = "\r\x1b[K"
# Seconds between two drawings of a bar.
_BETWEEN_S = 0.1


def safe(text: object) -> str:
    # No escape sequence of a log can recolour or rewrite the terminal.
    text = printable(str(text))
    if text.isascii() or _is_utf8(sys.stdout):
        return text
    # Here, and not by the stream: widths are taken afterwards, and an escape is longer than its character.
    return text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding)


def _is_utf8(stream: TextIO) -> bool:
    # None: a stream in memory, which takes every character.
    return stream.encoding is None or stream.encoding.lower().replace("-", "") == "utf8"


def line(text: object = "") -> None:
    print(safe(text), flush=True)


def wrapped(text: object, *, indent: str = "") -> None:
    room = min(width(), 100)
    for part in textwrap.wrap(
        safe(text), room, initial_indent=indent, subsequent_indent=indent, break_long_words=False
    ):
        line(part)


_MARKS = {
    "not checked": ("--", "blue"),
    "good": ("ok", "green"),
    "warning": ("WARN", "yellow"),
    "bad": ("BAD", "red"),
}


def finding(verdict: str, text: object, remedy: str = "") -> None:
    """Prints what was found behind a coloured word, and the remedy."""
    mark, colour = _MARKS[verdict]
    mark = f"{mark:<5}"
    print(click.style(mark, fg=colour, bold=True) if _paints() else mark, safe(text), flush=True)
    if remedy:
        line(f"      -> {remedy}")


def raw_line(text: bytes) -> None:
    """Prints one line of a log: tabs stay, everything else that is not text is escaped."""
    # Tabs are kept by cutting the line at them: `safe` would escape them with everything else that is no text.
    decoded = text.decode("utf-8", errors="replace").rstrip("\r")
    print("\t".join(safe(part) for part in decoded.split("\t")), flush=True)


def warning(text: object) -> None:
    # Paths of the installation are put in after `safe`: they are ours.
    print(f"verl-slurm: {with_places(safe(text))}", file=sys.stderr, flush=True)


@contextmanager
def told_if_interrupted(text: str) -> Iterator[None]:
    """Says what an interrupted command leaves behind."""
    try:
        yield
    except KeyboardInterrupt:
        warning(f"interrupted: {text}")
        raise


def json_value(value: object) -> None:
    print(json_line(value, ascii_only=not _is_utf8(sys.stdout)).decode(), flush=True)


def picked(value: object, names: str) -> dict[str, Any]:
    """Returns the attributes of these names, with blanks between them, for JSON."""
    return {name: getattr(value, name) for name in names.split()}


def answer(value: object, *lines: str, as_json: bool) -> None:
    if as_json:
        json_value(value)
    else:
        for text in lines:
            line(text)


def error(problem: VerlSlurmError, *, as_json: bool) -> None:
    """Prints the error as one line on standard error, and as JSON on standard output if JSON was asked for."""
    # Both: a script reads standard output, and people find the line where they look for errors.
    if as_json:
        json_value({"error": with_places(problem.one_line()), "exit_code": int(problem.exit_code)})
    for line in problem.lines():
        print(f"verl-slurm: {with_places(line)}", file=sys.stderr, flush=True)


def fields(rows: Iterable[tuple[str, object]], colours: Mapping[str, str] | None = None) -> None:
    """Prints aligned `name  value` lines, without empty values; `colours` by the first word, on a terminal."""
    # Made harmless before widths are taken: an escaped character is longer than what it stands for.
    shown = [(name, safe(value)) for name, value in rows if value not in (None, "")]
    names = max((len(name) for name, _ in shown), default=0) + GAP
    room = width() - names
    for name, value in shown:
        # Without a terminal each value stays one line, for scripts.
        parts = (
            textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
            if draws() and room > 0
            else []
        )
        first, *rest = parts or [value]
        painted = _coloured(first, colours) if colours and _paints() else first
        print("\n".join([f"{name:<{names}}{painted}", *(" " * names + part for part in rest)]), flush=True)


def width() -> int:
    """Returns the characters of a line of the terminal; without one, those of a table."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _NO_TERMINAL


def draws() -> bool:
    """Returns whether standard output is a terminal that has the characters of bars and curves."""
    return sys.stdout.isatty() and _is_utf8(sys.stdout)


def table(
    headings: Iterable[str] | Mapping[str, Sequence[object]],
    rows: Iterable[Sequence[object]] = (),
    *,
    right: Collection[str] = (),
    first_to_go: Sequence[str] = (),
    cut: str = "",
    colours: Mapping[str, str] | None = None,
) -> None:
    """Prints a table with a header; columns of numbers to the right.

    Args:
        headings: all different; or the columns, by heading, instead of rows.
        first_to_go, cut: as of `fitting`. A line below the table names the columns that are left out.
        colours: colours on a terminal of cells that begin with one of these words.
    """
    # Not by rich, which takes half a second for a thousand rows.
    if isinstance(headings, Mapping):
        columns = headings
    else:
        listed = list(rows)
        columns = {name: [row[index] for row in listed] for index, name in enumerate(headings)}
    # The names of a run's numbers are headings, and the run may be a stranger's.
    columns = {safe(name): cells for name, cells in columns.items()}
    numeric = {
        name
        for name, cells in columns.items()
        if cells and all(isinstance(cell, int | float) for cell in cells)
    }
    texts = {name: ["" if cell is None else safe(cell) for cell in cells] for name, cells in columns.items()}
    shown = fitting(texts, first_to_go, width(), cut=cut)
    rooms = {name: max(map(len, (name, *cells))) for name, cells in shown.items()}
    last = list(shown)[-1]
    before = sum(room + GAP for name, room in rooms.items() if name != last)
    if draws() and width() - before >= _LEAST:
        rooms[last] = min(rooms[last], width() - before)
    # Widths are taken from the bare text: escape sequences have characters and no width.
    paint = _paints()
    printed = []
    for number, cells in enumerate([list(shown), *zip(*shown.values(), strict=True)]):
        first, *rest = textwrap.wrap(cells[-1], max(rooms[last], 1), break_on_hyphens=False) or [""]
        line_ = [
            cell.rjust(room) if name in right or name in numeric else cell.ljust(room)
            for (name, room), cell in zip(rooms.items(), (*cells[:-1], first), strict=True)
        ]
        if paint and number == 0:
            line_ = [click.style(cell, bold=True) for cell in line_]
        elif paint and colours:
            line_ = [_coloured(cell, colours) for cell in line_]
        printed += [(" " * GAP).join(line_).rstrip(), *(" " * before + part for part in rest)]
    printed.insert(1, ("─" if _is_utf8(sys.stdout) else "-") * min(before + rooms[last], width()))
    if gone := [name for name in columns if name not in shown]:
        printed.append(f"no room for: {', '.join(gone)} (--json has them)")
    # One write for the whole table: a line each would flush a thousand times.
    print("\n".join(printed), flush=True)


def fitting(
    columns: Mapping[str, list[str]], first_to_go: Sequence[str], width: int, *, cut: str = ""
) -> dict[str, list[str]]:
    """Returns as many of the columns as have room (`width`).

    `first_to_go`: headings that are dropped, in this order; `cut`: a column whose cells then lose their beginnings.
    """
    columns = dict(columns)

    def too_much() -> int:
        rooms = [max(map(len, (name, *cells))) for name, cells in columns.items()]
        return sum(rooms) + GAP * (len(rooms) - 1) - width

    # Measured anew after each column that goes, so that no more are dropped than must be.
    for name in first_to_go:
        if too_much() <= 0:
            break
        columns.pop(name, None)
    if cut in columns and (excess := too_much()) > 0:
        room = max(max(map(len, columns[cut]), default=0) - excess, _LEAST)
        columns[cut] = [shortened(cell, room) for cell in columns[cut]]
    return columns


def shortened(text: str, room: int) -> str:
    dots = "…" if _is_utf8(sys.stdout) else "..."
    return text if len(text) <= room else f"{dots}{text[len(dots) - room :]}"


def _coloured(cell: str, colours: Mapping[str, str]) -> str:
    colour = next((colour for word, colour in colours.items() if cell.startswith(word)), None)
    return cell if colour is None else click.style(cell, fg=colour)


def _paints() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


class BottomLine:
    """A line at the bottom: rewritten in place on a terminal, one line for each step elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._tty = self._stream.isatty()
        self._shown = ""
        self._step = -1

    @property
    def is_live(self) -> bool:
        return self._tty

    def show(self, step: int, text: str) -> None:
        """Shows the present state; `step`: whole steps done."""
        text = safe(text)
        if self._tty:
            # A line that wraps could not be rewritten: the terminal takes back its last row alone.
            text = text[: max(shutil.get_terminal_size().columns - 1, 1)]
        # A terminal's line is rewritten when it changes. Elsewhere each step has one line, so that no log fills with
        # one sentence.
        if self._tty and text != self._shown:
            self._write(f"{_ERASE}{text}")
            self._shown = text
        elif not self._tty and step != self._step:
            self._write(f"{text}\n")
        self._step = step

    def line(self, text: str) -> None:
        # The bottom line is cleared, the new one takes its row, and the bottom line is drawn once more below it.
        erase = _ERASE if self._tty and self._shown else ""
        self._write(f"{erase}{safe(text)}\n{self._shown if erase else ''}")

    def close(self, *, erase: bool = False) -> None:
        if self._tty and self._shown:
            self._write(_ERASE if erase else "\n")
        self._shown = ""

    def _write(self, text: str) -> None:
        print(text, end="", file=self._stream, flush=True)


class Bar:
    """A bar for long work, on standard error if that is a terminal. `tells`: elsewhere a line for each kind of work."""

    def __init__(self, *, enabled: bool = True, tells: bool = False) -> None:
        # On standard error: standard output may be a pipe while somebody watches.
        self._bottom = BottomLine(sys.stderr)
        self._draws = enabled and self._bottom.is_live
        self._tells = enabled and tells and not self._draws
        self._kind = ""
        self._began = self._drawn = 0.0

    def show(self, text: str, done: int = 0, total: int = 0) -> None:
        """Shows the present work, and how many of its bytes are done; `total` 0: unknown."""
        kind, now = text.partition(" (")[0], time.monotonic()  # what is in brackets are its numbers
        if kind != self._kind:
            # The time that is left is estimated from the kind's own speed.
            self._kind, self._began, self._drawn = kind, now, -_BETWEEN_S
            if self._tells:
                warning(text)
        if not self._draws or now - self._drawn < _BETWEEN_S:
            return
        self._drawn = now
        if total:
            left = f", {span((now - self._began) * (total - done) / done)} left" if done else ""
            drawn = f"  {bar(done / total, 20)}" if _is_utf8(sys.stderr) else ""
            text = f"{text}{drawn}  {done / 1e6:,.0f} of {total / 1e6:,.0f} MB{left}"
        self._bottom.show(0, text)

    def counter(self, text: str, total: int) -> Callable[[int], None]:
        """Returns what adds up the bytes that are done, and shows them; several threads may call it."""
        done = 0
        # By one thread, before several of them show the same text.
        self.show(text, 0, total)

        def count(num_bytes: int) -> None:
            nonlocal done
            # Two threads may lose a block of the sum; a bar may be off by that.
            done += num_bytes
            self.show(text, min(done, total), total)

        return count

    def close(self) -> None:
        self._bottom.close(erase=True)


def bar(share: float, width: int) -> str:
    """Draws a share of 0 to 1, in eighths of a character."""
    full, rest = divmod(int(share * width * 8), 8)
    return ("█" * full + (_BLOCKS[rest] if rest else "")).ljust(width, "░")


def ago(time: object) -> str:
    """Formats the time since `time` (ISO 8601): `3 min ago`; `-` if that is no time."""
    try:
        # The text is from a file, and may be anything.
        then = datetime.fromisoformat(str(time))
    except ValueError:
        return "-"
    seconds = (datetime.now(UTC) - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
