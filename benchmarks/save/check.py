"""Answers in three minutes whether the save path got slower on this machine: `python -m benchmarks.save --check`.

Every figure is a ratio within one run, to what the machine itself takes for the same bytes: its speed moves from day to
day, and with it all seconds. Earlier checks of this machine are kept in the user's cache directory.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.save.figures import Figures
from benchmarks.save.records import Environment, Mode, Run

OPTIONS = {
    "gib": 0.25,
    "reps": 5,
    "what": ("stall", "durable", "verify"),
    "peers": ("ours", "ours_eager", "copy", "raw"),
    "generation_s": 0.3,
    "quiet_s": 1.0,
}
_LIMIT = 1.25
"""A ratio this many times that of earlier checks is slower."""
_NEWEST = 5
_FIGURES: tuple[tuple[str, str, str, Mode, str, str], ...] = (
    # name, ours, the machine's, mode, figures
    ("stall, eager staging / plain copy", "ours_eager", "copy", "loop", "stall", "stall"),
    ("durable / raw write and fsync", "ours", "raw", "direct", "durable", "durable"),
    ("verify / plain read", "ours", "ours", "verify", "verify", "plain_read"),
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One figure of a check.

    Attributes:
        now: the ratio; None: not measured.
        before: the median of that of earlier checks, and how many they are; None: none.
    """

    name: str
    now: float | None
    before: tuple[float, int] | None

    @property
    def is_slower(self) -> bool:
        """Returns whether it is clearly above earlier checks."""
        return self.now is not None and self.before is not None and self.now > _LIMIT * self.before[0]


def compare(run: Run, earlier: list[Run]) -> list[Compared]:
    """Holds a check to the newest earlier ones; those of other sizes and machines do not count. Pure."""
    like = [one for one in earlier if _is_like(run, one)][-_NEWEST:]
    found = []
    for name, *_ in _FIGURES:
        known = [ratio for one in like if (ratio := _ratios(one)[name]) is not None]
        before = (median(known), len(known)) if known else None
        found.append(Compared(name=name, now=_ratios(run)[name], before=before))
    return found


def text(compared: list[Compared]) -> str:
    """The answer, for a terminal."""
    lines = []
    for one in compared:
        now = "not measured" if one.now is None else f"{one.now:.2f}"
        before = (
            "no earlier check" if one.before is None else f"{one.before[0]:.2f} in {one.before[1]} earlier"
        )
        lines.append(f"{one.name:36} {now:>12}   {before}{'   SLOWER' if one.is_slower else ''}")
    if any(one.is_slower for one in compared):
        lines.append(f"the save path got slower: more than {_LIMIT:g} times what it was")
    elif any(one.before for one in compared):
        lines.append("the save path is no slower than it was")
    else:
        lines.append("nothing to compare with yet: check again after the next change")
    return "\n".join(lines) + "\n"


def keep(run: Run, place: Path | None = None) -> Path:
    """Keeps a check for later ones; returns its file."""
    place = place or _place()
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"save-{run.environment.started_utc.replace(':', '')}.json"
    file.write_bytes(msgspec.json.encode(run))
    return file


def earlier_runs(place: Path | None = None) -> list[Run]:
    """Returns the checks that were kept, oldest first; a file that is none is passed over."""
    found = []
    for file in sorted((place or _place()).glob("save-*.json")):
        try:
            found.append(msgspec.json.decode(file.read_bytes(), type=Run))
        except (OSError, msgspec.DecodeError):
            continue
    return found


def _place() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "verl-slurm" / "benchmarks"


def _is_like(run: Run, other: Run) -> bool:
    def machine(environment: Environment) -> tuple[str, int, set[str]]:
        return environment.cpu, environment.cores, set(environment.file_systems.values())

    same = (run.gib, run.ranks) == (other.gib, other.ranks)
    return same and machine(run.environment) == machine(other.environment) and not other.stopped


def _ratios(run: Run) -> dict[str, float | None]:
    figures, found = Figures(run.samples), {}
    for name, ours, reference, mode, figure, of_reference in _FIGURES:
        group = "verify" if mode == "verify" else "main"
        a, b = figures.of(group, ours, mode, figure), figures.of(group, reference, mode, of_reference)
        found[name] = a.median / b.median if a and b and b.median > 0 else None
    return found
