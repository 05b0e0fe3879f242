"""The last steps of a run as a table: rows of `steps.jsonl` in, columns and cells out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["steps_table"]

_Form = Callable[[float], str]
_COLUMNS: tuple[tuple[str, str, _Form], ...] = (
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
    ("tokens_per_second", "tok/s", "{:.0f}".format),
    ("step_s", "s", "{:.1f}".format),
    ("communication_share", "comm.", "{:.0%}".format),
)
"""Name in the row, heading, and format."""

_OF_GUESTS: tuple[tuple[str, str], ...] = (
    *(("critic/score/mean", "score"), ("critic/rewards/mean", "reward"), ("actor/pg_loss", "policy loss")),
    *(("loss", "loss"), ("train/loss", "loss"), ("train_loss", "loss"), ("val/loss", "val. loss")),
    *(("eval_loss", "eval. loss"), ("actor/grad_norm", "grad norm"), ("grad_norm", "grad norm")),
    *(("lr", "lr"), ("response_length/mean", "length"), ("perf/throughput", "tok/s")),
)
"""The names that verl, Hugging Face and others use, the most telling first."""
_MOST_OF_A_GUEST = 6

_FIRST_TO_GO = (
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
    guests = () if any("policy_loss" in row for row in rows) else _guests_columns(rows)
    shown = {
        name: [heading, *(form(row[name]) if _is_number(row.get(name)) else "-" for row in rows)]
        for name, heading, form in (*_COLUMNS[:1], *guests, *_COLUMNS[1:])
        if any(_is_number(row.get(name)) for row in rows)
    }
    for name in (*_FIRST_TO_GO, *(name for name, _, _ in reversed(guests))):
        if sum(max(map(len, cells)) + _GAP for cells in shown.values()) - _GAP <= width:
            break
        shown.pop(name, None)
    columns = list(shown.values())
    return [cells[0] for cells in columns], [
        [cells[line] for cells in columns] for line in range(1, len(rows) + 1)
    ]


def _guests_columns(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str, _Form], ...]:
    ours = {name for name, _, _ in _COLUMNS} | {"attempt"}
    said = {name: name for row in rows for name in row if name not in ours and _is_number(row[name])}
    known = {name: heading for name, heading in _OF_GUESTS if name in said}
    chosen = list((known | {name: known.get(name, name) for name in said}).items())[:_MOST_OF_A_GUEST]
    return tuple((name, heading, "{:.4g}".format) for name, heading in chosen)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 1 << 53
