"""Shows how far a run is: a bar of its steps, the time that is left, a curve of its reward, its nodes. Pure.

A bar or a curve tells nothing that the words beside it do not. So they are for terminals, and a screen reader or a log
misses nothing.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from verl_slurm.base.one_line import counted
from verl_slurm.cli.show.render import span
from verl_slurm.cli.show.run_tables import TELLING
from verl_slurm.journal.pace import Pace, number

_BLOCKS = " ▏▎▍▌▋▊▉█"
_EMPTY = "░"
_LEVELS = "▁▂▃▄▅▆▇█"
_MOST_NAMED = 6
"""Nodes of a state that are named."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One number over the last steps."""

    name: str
    """Of the row's field."""
    called: str
    values: list[float]
    """Oldest first; a step without the number is left out."""


def curve_of(rows: Sequence[Mapping[str, Any]]) -> Curve | None:
    """Returns the reward, or what tells most of another loop, if at least two rows have it; else None.

    Steps that another reward scored are left out: it may have another scale.
    """
    rows = [row for row in rows if row.get("reward_number") == rows[-1].get("reward_number")]
    for name, called in (("reward", "reward"), *TELLING):
        values = [value for row in rows if (value := number(row.get(name))) is not None]
        if len(values) > 1:
            return Curve(name=name, called=called, values=values)
    return None


def bar(share: float, width: int) -> str:
    """Draws a share of 0 to 1, in eighths of a character."""
    eighths = int(share * width * 8)
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + (_BLOCKS[rest] if rest else "")
    return drawn.ljust(width, _EMPTY)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws the last `width` values, from the lowest of them to the highest."""
    # Halved: the difference of two values may be more than a double holds.
    halves = [value / 2 for value in values[-width:]] if width > 0 else []
    low, high = min(halves, default=0.0), max(halves, default=0.0)
    # A value that never changes is drawn in the middle.
    if high == low:
        return _LEVELS[3] * len(halves)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round((half - low) / (high - low) * top)] for half in halves)


def steps_words(pace: Pace) -> str:
    """Formats `34 of 100, 34%`."""
    if pace.share is None:
        return f"{pace.steps_done} done; the loop does not say of how many"
    return f"{pace.steps_done} of {pace.steps}, {pace.share:.0%}"


def left_words(
    pace: Pace,
    *,
    waits: bool,
    over: bool,
    starts: datetime | None = None,
    ends: datetime | None = None,
    now: datetime,
) -> str:
    """Says how much training is left, and what that does not count.

    Args:
        waits: the job is in Slurm's queue.
        over: there is no job any more.
        starts: when Slurm expects it to start.
        ends: when its time limit is reached.
    """
    if pace.seconds_left is None:
        return (
            f"not known: {'no step has a time yet' if pace.step_s is None else 'the loop has no last step'}"
        )
    if not pace.seconds_left:
        return "none: all steps are done"
    about = f"about {span(pace.seconds_left)} of training, at {span(pace.step_s or 0.0)} a step"
    if waits:
        known = f"Slurm expects that {_clock(starts)}" if starts is not None else "when is not known"
        return f"{about}, once the job has started: {known}"
    if over:
        return f"{about}; no job is running"
    if ends is not None and (ends - now).total_seconds() < pace.seconds_left:
        return f"{about}; the job's time limit comes before, and the wait for the next start is not in it"
    return f"{about}, without further interruptions"


def _clock(time: datetime) -> str:
    return time.astimezone().strftime("at %m-%d %H:%M")


def curve_words(curve: Curve, width: int) -> str:
    """Formats `reward ▁▃▅█ 0.12 to 0.53 in 20 steps`.

    Args:
        width: characters of the drawing; 0: none.
    """
    first, last = curve.values[0], curve.values[-1]
    parts = [
        curve.called,
        sparkline(curve.values, width),
        f"{first:.3g} to {last:.3g} in {len(curve.values)} steps",
    ]
    return " ".join(part for part in parts if part)


def node_words(nodes: Mapping[str, Sequence[str]]) -> str:
    """Formats `2 training (n1, n2), 1 spare (n3)`."""
    return ", ".join(f"{len(names)} {state} ({_named(names)})" for state, names in nodes.items())


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    return f"{shown} and {counted(more, 'other')}" if more > 0 else shown


_BAR = 12
_CURVE = 12


def live_line(
    words: str, pace: Pace, curve: Curve | None, nodes: Mapping[str, Sequence[str]], width: int
) -> str:
    """Returns the line at the bottom of a followed run, with as much as has room. Step and phase always stay.

    Args:
        words: step, phase and numbers, with two blanks between them (`story.progress`).
        width: characters; 0: no terminal, so nothing is drawn.
    """
    left = "" if not pace.seconds_left else f"{span(pace.seconds_left)} left"
    # A run on few nodes needs no count of them; what is not usual is said.
    unusual = {state: names for state, names in nodes.items() if state not in ("training", "avoided")}
    states = ", ".join(f"{len(names)} {state}" for state, names in unusual.items())
    step, *numbers = words.split("  ")
    parts: dict[str | int, str] = {
        "bar": "" if pace.share is None or not width else bar(pace.share, _BAR),
        "step": step,
        "left": left,
        "curve": sparkline(curve.values, _CURVE) if curve is not None and width else "",
        "nodes": states,
        **dict(enumerate(numbers)),
    }
    # From the last number on, which tells least; a phase, the first of them, is near the end.
    for name in (*range(len(numbers) - 1, 0, -1), "curve", "bar", "nodes", 0, "left"):
        if not width or len(_joined(parts)) < width:
            break
        parts[name] = ""
    return _joined(parts)


def _joined(parts: Mapping[str | int, str]) -> str:
    return "  ".join(part for part in parts.values() if part)
