"""Formats a run's interruptions, and its last steps: values in, columns and cells out."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from verl_slurm.cli.show.render import span
from verl_slurm.journal.history import Outage
from verl_slurm.journal.pace import number

_PARTS = ("save", "queue", "start", "again")
"""Of an outage, in seconds."""
INTERRUPTIONS_TO_GO = ("resumed from", "again", "save", "start", "tokens lost")
"""Columns that are dropped if the terminal is narrow, in this order."""


def interruption_words(facts: Mapping[str, Any]) -> str:
    """Formats `3 times (2x preemption, 1x crash): 4 min 12 s in all, 3 min 2 s of it in the queue; no token was
    lost`.
    """
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
        return f"{words}; none while the ranks trained"
    some = f"{len(unsaved)} without a save to go on from"
    if not facts["has_ledger"]:
        return f"{words}; {some}, what came after the last checkpoint was done again"
    if lost := sum(1 for row in unsaved if row["rollouts_lost"]):
        return f"{words}; {some}, {lost} of these also lost finished rollouts"
    return f"{words}; {some}, finished rollouts are in the ledger"


def interruptions_table(
    outages: Sequence[Outage], now: datetime, *, has_ledger: bool = True
) -> dict[str, list[str]]:
    """Returns cells by heading."""
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
"""Name in the row, heading, and format."""

TELLING: tuple[tuple[str, str], ...] = (
    *(("critic/score/mean", "score"), ("critic/rewards/mean", "reward"), ("actor/pg_loss", "policy loss")),
    *(("loss", "loss"), ("train/loss", "loss"), ("train_loss", "loss")),
)
"""The names that verl, Hugging Face and others use for what tells how a training goes, the most telling first."""
_OF_GUESTS = (
    *TELLING,
    *(("val/loss", "val. loss"), ("eval_loss", "eval. loss")),
    *(("actor/grad_norm", "grad norm"), ("grad_norm", "grad norm"), ("lr", "lr")),
    *(("response_length/mean", "length"), ("perf/throughput", "tok/s")),
)
_MOST_OF_A_GUEST = 6

_FIRST_STEPS_TO_GO = (
    *("comm.", "grad norm", "expl. var.", "length", "clipped", "lr", "entropy", "value loss", "policy loss"),
    *("s", "tok/s", "KL"),
)
"""Columns that are dropped if there is no room for all, in this order."""


def steps_table(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[str]], list[str]]:
    """Returns cells by heading, without columns that no row has; and the columns to drop first.

    For a loop that is not ours, shows its own numbers: the known ones first, then the others in the loop's order.

    The rows come from a file, so a value may be anything; a value that is no number is shown as `-`.
    """
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
