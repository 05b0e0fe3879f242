"""Formats how far a run is: its steps, its interruptions, a bar, a curve, its nodes. Values in, words and cells out."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from verl_slurm.base.one_line import counted
from verl_slurm.cli.show.render import bar, span
from verl_slurm.journal.history import Outage
from verl_slurm.journal.pace import Pace, number

# Of an outage, in seconds.
_PARTS = ("save", "queue", "start", "again")
# Columns that are dropped if the terminal is narrow, in this order.
INTERRUPTIONS_TO_GO = ("resumed from", "again", "save", "start", "tokens lost")


def interruption_words(facts: Mapping[str, Any]) -> str:
    """Formats `3 times (2x preemption, 1x crash): 4 min 12 s in all, 3 min 2 s of it in the queue; ...`."""
    if not facts["count"]:
        return "never"
    counts = Counter(row["cause"] for row in facts["each"])
    # No plural is formed: causes are of all kinds of words, as `node lost`. A single one needs no number.
    each = [(cause.replace("_", " "), count) for cause, count in counts.most_common()]
    causes = each[0][0] if len(each) == 1 else ", ".join(f"{count}x {cause}" for cause, count in each)
    times = "once" if facts["count"] == 1 else f"{facts['count']} times"
    words = (
        f"{times} ({causes}): {span(facts['seconds'])} in all, {span(facts['queue_s'])} of it in the queue"
    )
    if facts["tokens_lost"] == 0:
        return f"{words}; no token was lost"
    unsaved = [row for row in facts["each"] if row["tokens_lost"] is None and row["trained"]]
    if not unsaved:
        return f"{words}; no token was lost while the ranks trained"
    some = f"{len(unsaved)} without a save to go on from"
    if not facts["has_ledger"]:
        return f"{words}; {some}, what came after the last checkpoint was done again"
    if lost := sum(1 for row in unsaved if row["rollouts_lost"]):
        return f"{words}; {some}, {lost} of these also lost finished rollouts"
    return f"{words}; {some}, finished rollouts are in the ledger"


def interruptions_table(
    outages: Sequence[Outage], now: datetime, *, has_ledger: bool = True
) -> dict[str, list[str]]:
    return {
        "interrupted": [_clock(one.began) for one in outages],
        "cause": [one.cause.replace("_", " ") for one in outages],
        "cost": [_cost(one, now) for one in outages],
        **{name: [_span(getattr(one, f"{name}_s")) for one in outages] for name in _PARTS},
        "tokens lost": [_lost(one, has_ledger) for one in outages],
        "resumed from": ["-" if one.resumed is None else one.resumed or "the beginning" for one in outages],
    }


def _lost(one: Outage, has_ledger: bool) -> str:
    if one.tokens_lost == 0:
        return "0"
    if one.rollouts_lost:
        return "finished ones, too"
    return "unfinished ones" if has_ledger else "not known"


def _span(seconds: float | None) -> str:
    return "-" if seconds is None else span(seconds)


def _cost(one: Outage, now: datetime) -> str:
    if one.seconds is None:
        return f"{span(one.so_far(now))} so far"
    # An interruption during another one's start ends the first: nothing new was sampled in between.
    return span(one.seconds) if one.back else f"{span(one.seconds)}, then the next"


def _clock(time: str) -> str:
    # A journal's times are UTC, and people compare them with their own clock.
    then = datetime.fromisoformat(time)
    return then.replace(tzinfo=then.tzinfo or UTC).astimezone().strftime("%m-%d %H:%M:%S")


_Form = Callable[[float], str]
# Name in the row, heading, and format.
_STEP_COLUMNS: tuple[tuple[str, str, _Form], ...] = (
    ("step", "step", "{:.0f}".format),
    ("reward", "reward", "{:.3f}".format),
    ("eval/reward", "eval", "{:.3f}".format),
    ("kl", "KL", "{:.3g}".format),
    ("policy_loss", "policy loss", "{:+.4f}".format),
    ("value_loss", "value loss", "{:.4f}".format),
    ("explained_variance", "expl. var.", "{:.2f}".format),
    ("entropy", "entropy", "{:.2f}".format),
    ("policy_clip", "clipped", "{:.1%}".format),
    ("actor_grad_norm", "grad norm", "{:.2g}".format),
    ("learning_rate", "lr", "{:.2g}".format),
    ("response_tokens", "length", "{:.1f}".format),
    # A step whose responses were all replayed has sampled none.
    ("tokens_per_second", "tok/s", lambda value: f"{value:.0f}" if value > 0 else "-"),
    ("step_s", "s", "{:.1f}".format),
    ("communication_share", "comm.", "{:.0%}".format),
)

TELLING: tuple[tuple[str, str], ...] = (
    *(("critic/score/mean", "score"), ("critic/rewards/mean", "reward"), ("actor/pg_loss", "policy loss")),
    *(("loss", "loss"), ("train/loss", "loss"), ("train_loss", "loss")),
)
"""Names that verl, Hugging Face and others use for what tells how a training goes, the most telling first."""
_OF_GUESTS = (
    *TELLING,
    *(("val/loss", "val. loss"), ("eval_loss", "eval. loss")),
    *(("actor/grad_norm", "grad norm"), ("grad_norm", "grad norm"), ("lr", "lr")),
    *(("response_length/mean", "length"), ("perf/throughput", "tok/s")),
)
_MOST_OF_A_GUEST = 6

# Columns that are dropped if there is no room for all, in this order.
_FIRST_STEPS_TO_GO = (
    *("comm.", "grad norm", "expl. var.", "length", "clipped", "lr", "entropy", "value loss", "policy loss"),
    *("s", "tok/s", "KL"),
)


def steps_table(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[str]], list[str]]:
    """Returns cells by heading, without columns that no row has; and the columns to drop first. `-`: no number."""
    # Our own trainer writes policy_loss in each row; no row with it means that the loop is not ours.
    guests = () if any("policy_loss" in row for row in rows) else _guests_columns(rows)
    shown = {
        heading: [form(row[name]) if number(row.get(name)) is not None else "-" for row in rows]
        for name, heading, form in (*_STEP_COLUMNS[:1], *guests, *_STEP_COLUMNS[1:])
        if any(number(row.get(name)) is not None for row in rows)
    }
    # A guest's least telling columns go first: its columns are in the order of `_OF_GUESTS`.
    return shown, [*_FIRST_STEPS_TO_GO, *(heading for _, heading, _ in reversed(guests))]


def _guests_columns(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str, _Form], ...]:
    ours = {name for name, _, _ in _STEP_COLUMNS} | {"attempt"}
    said = dict.fromkeys(
        name for row in rows for name in row if name not in ours and number(row[name]) is not None
    )
    # By heading: of two names for the same thing the more telling one has it.
    known = {heading: name for name, heading in reversed(_OF_GUESTS) if name in said}
    ordered = {name: heading for name, heading in _OF_GUESTS if known.get(heading) == name}
    chosen = list((ordered | {name: ordered.get(name, name) for name in said}).items())[:_MOST_OF_A_GUEST]
    return tuple((name, heading, "{:.4g}".format) for name, heading in chosen)


_LEVELS = "▁▂▃▄▅▆▇█"
# Nodes of a state that are named.
_MOST_NAMED = 6


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One number over the last steps."""

    name: str
    """Of the row's field."""
    called: str
    values: list[float]
    """Oldest first; a step without the number is left out."""


def curve_of(rows: Sequence[Mapping[str, Any]]) -> Curve | None:
    """Returns the reward, or what tells most of another loop, if at least two rows have it; else None."""
    # Another reward may have another scale.
    rows = [row for row in rows if row.get("reward_number") == rows[-1].get("reward_number")]
    for name, called in (("reward", "reward"), *TELLING):
        values = [value for row in rows if (value := number(row.get(name))) is not None]
        if len(values) > 1:
            return Curve(name=name, called=called, values=values)
    return None


def sparkline(values: Sequence[float], width: int) -> str:
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
        waits, over: the job is in Slurm's queue; there is no job any more.
        starts, ends: when Slurm expects it to start; when its time limit is reached.
    """
    if pace.seconds_left is None:
        return (
            f"not known: {'no step has a time yet' if pace.step_s is None else 'the loop has no last step'}"
        )
    if not pace.seconds_left:
        return "none: all steps are done"
    about = f"about {span(pace.seconds_left)} of training, at {span(pace.step_s or 0.0)} a step"
    if waits:
        known = (
            f"Slurm expects that {starts.astimezone():at %m-%d %H:%M}"
            if starts is not None
            else "when is not known"
        )
        return f"{about}, once the job has started: {known}"
    if over:
        return f"{about}; no job is running"
    if ends is not None and (ends - now).total_seconds() < pace.seconds_left:
        return f"{about}; the job's time limit comes before, and the wait for the next start is not in it"
    return f"{about}, without further interruptions"


def curve_words(curve: Curve, width: int) -> str:
    """Formats `reward ▁▃▅█ 0.12 to 0.53 in 20 steps`; a drawing of no `width` is left out."""
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
