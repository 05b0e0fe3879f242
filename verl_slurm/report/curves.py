"""Adds the rows of `steps.jsonl` up: curves over the steps that count, tokens, phases, stalls. Pure.

A row whose step is not above the one before it throws that one, and all up to it, back: those steps are done again
and do not count.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from verl_slurm.journal.pace import number
from verl_slurm.journal.steps import StepRow
from verl_slurm.report.report_facts import RunCurve, Tokens

# Name, title, and the columns of our trainer, verl and others that have it; the first that a run has is
# drawn.
_CURVES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("reward", "Reward", ("reward", "critic/score/mean", "critic/rewards/mean", "train/reward")),
    ("eval", "Reward of the evaluation", ("eval/reward",)),
    ("kl", "KL against the reference", ("kl", "actor/kl_loss", "actor/reward_kl_penalty", "train/kl")),
    ("policy_kl", "KL of the updates", ("actor/ppo_kl",)),
    ("loss", "Policy loss", ("policy_loss", "actor/pg_loss", "loss", "train/loss", "train_loss")),
    ("value_loss", "Value loss", ("value_loss", "critic/vf_loss")),
    ("eval_loss", "Loss of the evaluation", ("val/loss", "eval_loss", "eval/loss")),
    ("entropy", "Entropy", ("entropy", "actor/entropy", "actor/entropy_loss", "train/entropy")),
    ("length", "Response length (tokens)", ("response_tokens", "response_length/mean", "completions/mean_length")),
    ("tokens_per_second", "Tokens per second", ("tokens_per_second", "perf/throughput")),
    ("step_s", "Seconds per step", ("step_s", "timing_s/step", "perf/time_per_step")),
)  # fmt: skip
# Of columns that are not quite what others have: any loop's loss need not be a policy's.
_TITLES = {"loss": "Loss", "perf/throughput": "Tokens per second and GPU"}
_PHASES = {
    "generate_s": "sampling",
    "timing_s/gen": "sampling",
    "score_s": "scoring",
    "timing_s/reward": "scoring",
    "timing_s/old_log_prob": "log probabilities",
    "timing_s/ref": "reference model",
    "timing_s/values": "values",
    "timing_s/adv": "advantages",
    "update_s": "updates",
    "timing_s/update_critic": "updates of the critic",
    "timing_s/update_actor": "updates of the actor",
    "timing_s/update_weights": "weight sync",
    "eval_s": "evaluation",
    "timing_s/testing": "evaluation",
    "timing_s/save_checkpoint": "saves",
}
_WANTED = {column for _, _, columns in _CURVES for column in columns} | _PHASES.keys() | {"stall_s"}
_KNOWN = _WANTED | {"step", "attempt"}
_MOST_OTHERS = 4
_MOST_POINTS = 500
_MOST_STEPS = 200_000


class Steps:
    """The rows of one run; `responses`: sampled for one step, None: not known."""

    def __init__(self, rows: Iterable[StepRow] = (), responses: int | None = None) -> None:
        self._rows: list[dict[str, float]] = []
        self._responses, self._others = responses, dict[str, None]()
        self._sampled: float | None = None
        self._repeated = 0.0
        for row in rows:
            self.feed(row)

    def feed(self, row: StepRow) -> None:
        """Add the next line of the file."""
        step = row["step"]
        while self._rows and self._rows[-1]["step"] >= step:
            self._repeated += self._tokens(self._rows.pop()) or 0.0
        numbers = {name: value for name, given in row.items() if (value := number(given)) is not None}
        speed, seconds = numbers.get("tokens_per_second"), numbers.get("generate_s")
        if speed is not None and seconds is not None:
            self._sampled = (self._sampled or 0.0) + speed * seconds
        for name in numbers:
            if name not in _KNOWN and len(self._others) < _MOST_OTHERS:
                self._others[name] = None
        # Of a row, only the columns that are used: a run may have 100,000 of them.
        kept = {name: value for name, value in numbers.items() if name in _WANTED or name in self._others}
        # A run of more steps than that keeps its newest: pages have a size.
        if len(self._rows) == _MOST_STEPS:
            del self._rows[: _MOST_STEPS // 2]
        self._rows.append({**kept, "step": float(step), "attempt": numbers.get("attempt", 0.0)})

    @property
    def last(self) -> int:
        """The newest step; 0: none."""
        return int(self._rows[-1]["step"]) if self._rows else 0

    def curves(self) -> list[RunCurve]:
        """Returns the known curves; of a loop with unknown columns its first four."""
        found = []
        for name, title, columns in _CURVES:
            column = next((one for one in columns if any(one in row for row in self._rows)), None)
            # A step whose responses were all replayed sampled none: no speed, rather than a speed of 0.
            above = 0.0 if name == "tokens_per_second" else -math.inf
            curve = self._curve(name, _TITLES.get(column or "", title), column, above)
            found += [curve] if curve else []
        if not any(curve.name != "step_s" for curve in found):
            others = (self._curve(name, name, name) for name in self._others)
            found = [*(curve for curve in others if curve), *found]
        return found

    def attempts_at(self) -> list[tuple[int, int]]:
        """(attempt, its first step that counts)."""
        firsts = self._rows[:1] + [b for a, b in pairwise(self._rows) if b["attempt"] != a["attempt"]]
        return [(int(row["attempt"]), int(row["step"])) for row in firsts]

    def tokens(self) -> Tokens:
        """Tokens of responses, over the whole run."""
        each = [tokens for row in self._rows if (tokens := self._tokens(row)) is not None]
        return Tokens(
            sampled=None if self._sampled is None else round(self._sampled),
            used=round(sum(each)) if each else None,
            repeated=round(self._repeated) if each else None,
        )

    def phases(self) -> dict[str, float]:
        """Seconds of the parts of the steps that count, and of what is between them (`other`)."""
        found = dict.fromkeys(_PHASES.values(), 0.0)
        for row in self._rows:
            for column, phase in _PHASES.items():
                found[phase] += row.get(column, 0.0)
        whole = sum(row.get("step_s", row.get("timing_s/step", 0.0)) for row in self._rows)
        rest = whole - sum(found.values())
        parts = {phase: round(seconds, 3) for phase, seconds in found.items() if seconds > 0.0}
        return parts | ({"other": round(rest, 3)} if parts and rest > 0.0 else {})

    def stall_after(self, saves: Sequence[int]) -> list[float | None]:
        """Seconds that training waited for saves from each of the steps `saves` (rising) to the next; None: not
        measured.
        """
        found: list[float | None] = [None] * len(saves)
        number = -1
        for row in self._rows:
            while number + 1 < len(saves) and row["step"] > saves[number + 1]:
                number += 1
            if number >= 0 and "stall_s" in row:
                found[number] = (found[number] or 0.0) + row["stall_s"]
        return found

    def _tokens(self, row: Mapping[str, float]) -> float | None:
        mean = row.get("response_tokens", row.get("response_length/mean"))
        return None if mean is None or self._responses is None else mean * self._responses

    def _curve(self, name: str, title: str, column: str | None, above: float = -math.inf) -> RunCurve | None:
        points = [(row["step"], row[column]) for row in self._rows if column in row and row[column] > above]
        if column is None or not points:
            return None
        values = [value for _, value in points]
        each = -(-len(points) // _MOST_POINTS)
        return RunCurve(
            name=name,
            title=title,
            source=column,
            points=_means(points, each),
            each=each,
            first=values[0],
            last=values[-1],
            least=min(values),
            most=max(values),
        )


def _means(points: Sequence[tuple[float, float]], each: int) -> list[tuple[float, float]]:
    """The last step, and the mean value, of every `each` neighbouring points."""
    groups = (points[begin : begin + each] for begin in range(0, len(points), each))
    # 6 digits, so that a page stays small.
    return [(group[-1][0], float(f"{sum(value for _, value in group) / len(group):.6g}")) for group in groups]
