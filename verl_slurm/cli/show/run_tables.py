"""Formats a run's interruptions, and its last steps: values in, columns and cells out."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from verl_slurm.cli.show import render
from verl_slurm.cli.show.render import span
from verl_slurm.journal.folds.outages import Outage
from verl_slurm.journal.folds.pace import number

__all__ = ["TELLING", "interruption_words", "interruptions_table", "steps_table"]


_COLUMNS: tuple[tuple[str, Callable[[Outage], float | None]], ...] = (
    ("save", lambda one: one.save_s),
    ("queue", lambda one: one.queue_s),
    ("start", lambda one: one.start_s),
    ("again", lambda one: one.again_s),
)
_FIRST_TO_GO = ("resumed from", "again", "save", "start", "tokens lost")


def interruption_words(facts: Mapping[str, Any]) -> str:
    """Formats `3 times (2 preemption, 1 crash): 4 min 12 s in all, 3 min 2 s of it in the queue; no token was lost`."""
    if not facts["count"]:
        return "never"
    counts = Counter(row["cause"] for row in facts["each"])
    causes = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in counts.most_common())
    times = "once" if facts["count"] == 1 else f"{facts['count']} times"
    words = (
        f"{times} ({causes}): {span(facts['seconds'])} in all, {span(facts['queue_s'])} of it in the queue"
    )
    if facts["tokens_lost"] == 0:
        return f"{words}; no token was lost"
    some = sum(1 for row in facts["each"] if row["tokens_lost"] is None)
    return f"{words}; {some} without a save, finished rollouts are in the ledger"


def interruptions_table(
    outages: Sequence[Outage], now: datetime, width: int
) -> tuple[list[str], list[list[str]]]:
    """Returns headings and cells, one line each; columns that have no room are left out.

    Args:
        width: characters of a line.
    """
    columns: dict[str, list[str]] = {
        "interrupted": [_clock(one.began) for one in outages],
        "cause": [one.cause.replace("_", " ") for one in outages],
        "cost": [_cost(one, now) for one in outages],
    }
    for name, part in _COLUMNS:
        columns[name] = ["-" if (seconds := part(one)) is None else span(seconds) for one in outages]
    columns["tokens lost"] = ["0" if one.tokens_lost == 0 else "unfinished ones" for one in outages]
    columns["resumed from"] = [_resumed(one) for one in outages]
    return render.fitting(columns, _FIRST_TO_GO, width)


def _cost(one: Outage, now: datetime) -> str:
    if one.seconds is None:
        return f"{span(one.so_far(now))} so far"
    # An interruption during another one's start ends the first: nothing new was sampled in between.
    return span(one.seconds) if one.back else f"{span(one.seconds)}, then the next"


def _resumed(one: Outage) -> str:
    return "-" if one.resumed is None else one.resumed or "the beginning"


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
    *("communication_share", "actor_grad_norm", "explained_variance", "response_tokens", "policy_clip"),
    *("learning_rate", "entropy", "value_loss", "policy_loss", "step_s", "tokens_per_second", "kl"),
)
"""Columns that are dropped if there is no room for all, in this order."""
_GAP = 3
"""Columns between columns."""


def steps_table(rows: Sequence[Mapping[str, Any]], width: int) -> tuple[list[str], list[list[str]]]:
    """Returns headings and cells, one line per step. A column that no row has is left out, and so are columns without
    room.

    For a loop that is not ours, shows its own numbers: the known ones first, then the others in the loop's order.

    The rows come from a file, so a value may be anything; a value that is no number is shown as `-`.

    Args:
        width: characters of a line.
    """
    # Our own trainer writes policy_loss in each row; no row with it means that the loop is not ours.
    guests = () if any("policy_loss" in row for row in rows) else _guests_columns(rows)
    shown = {
        name: [heading, *(form(row[name]) if number(row.get(name)) is not None else "-" for row in rows)]
        for name, heading, form in (*_STEP_COLUMNS[:1], *guests, *_STEP_COLUMNS[1:])
        if any(number(row.get(name)) is not None for row in rows)
    }
    # A guest's least telling columns go first: its columns are in the order of `_OF_GUESTS`.
    for name in (*_FIRST_STEPS_TO_GO, *(name for name, _, _ in reversed(guests))):
        if sum(max(map(len, cells)) + _GAP for cells in shown.values()) - _GAP <= width:
            break
        shown.pop(name, None)
    columns = list(shown.values())
    return [cells[0] for cells in columns], [
        [cells[line] for cells in columns] for line in range(1, len(rows) + 1)
    ]


def _guests_columns(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str, _Form], ...]:
    ours = {name for name, _, _ in _STEP_COLUMNS} | {"attempt"}
    said = {name: name for row in rows for name in row if name not in ours and number(row[name]) is not None}
    known = {name: heading for name, heading in _OF_GUESTS if name in said}
    chosen = list((known | {name: known.get(name, name) for name in said}).items())[:_MOST_OF_A_GUEST]
    return tuple((name, heading, "{:.4g}".format) for name, heading in chosen)
