"""Formats what each interruption of a run cost: the sum as a sentence, each as a line of a table."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from verl_slurm.cli import render
from verl_slurm.cli.spans import span
from verl_slurm.journal.folds.outages import Outage, Outages

__all__ = ["interruption_facts", "interruption_words", "interruptions_table"]

_COLUMNS: tuple[tuple[str, Callable[[Outage], float | None]], ...] = (
    ("save", lambda one: one.save_s),
    ("queue", lambda one: one.queue_s),
    ("start", lambda one: one.start_s),
    ("again", lambda one: one.again_s),
)
_FIRST_TO_GO = ("resumed from", "again", "save", "start", "tokens lost")


def interruption_facts(outages: Outages, now: datetime) -> dict[str, Any]:
    """Returns the sum, and each interruption with its parts (`outages.Outage`), for `--json`. One that lasts has its
    time so far.
    """
    each = []
    for one in outages.each:
        lasts = one.seconds is None
        row = {**msgspec.to_builtins(one), "tokens_lost": one.tokens_lost, "lasts": lasts}
        each.append(row | ({"seconds": round(_so_far(one, now), 3)} if lasts else {}))
    return {
        "count": len(each),
        "seconds": round(sum(row["seconds"] for row in each), 3),
        "queue_s": round(sum(one.queue_s or 0.0 for one in outages.each), 3),
        "tokens_lost": 0 if all(one.tokens_lost == 0 for one in outages.each) else None,
        "each": each,
    }


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
        return f"{span(_so_far(one, now))} so far"
    return span(one.seconds) if one.back else f"{span(one.seconds)}, then the next"


def _so_far(one: Outage, now: datetime) -> float:
    return max((now - datetime.fromisoformat(one.began)).total_seconds(), 0.0)


def _resumed(one: Outage) -> str:
    return "-" if one.resumed is None else one.resumed or "the beginning"


def _clock(time: str) -> str:
    then = datetime.fromisoformat(time)
    return then.replace(tzinfo=then.tzinfo or UTC).astimezone().strftime("%m-%d %H:%M:%S")
