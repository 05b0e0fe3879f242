"""Samples into medians and ratios. Pure.

Ratios are only taken between peers of one group: they were measured in the same processes, in turn. A peer that
has to be alone brought company for that.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from benchmarks.save.records import Mode, Sample


@dataclass(frozen=True, kw_only=True)
class Spread:
    """What the repetitions of one figure gave: seconds, CPU seconds or bytes."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """None if there are none.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.0, high=3.0, count=3)
    """
    known = sorted(values)
    if not known:
        return None
    return Spread(median=median(known), low=known[0], high=known[-1], count=len(known))


class Figures:
    """The samples of a run by (group, peer, mode, figure). The cold repetition 0 is kept apart.

    Called by: targets, tables.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._warm: dict[tuple[str, str, Mode, str], list[float]] = defaultdict(list)
        self._cold: dict[tuple[str, str, Mode, str], float] = {}
        self._exact: dict[str, list[bool]] = defaultdict(list)
        self.errors: dict[str, str] = {}
        self.groups: dict[str, list[str]] = defaultdict(list)
        for sample in samples:
            # One load is one process: all that loaded belong together, as do all whose memory was watched.
            group = sample.mode if sample.mode in ("load", "memory", "keep") else sample.group
            if sample.peer not in self.groups[group]:
                self.groups[group].append(sample.peer)
            if sample.bit_exact is not None:
                self._exact[sample.peer].append(sample.bit_exact)
            if sample.error:
                self.errors.setdefault(sample.peer, sample.error)
                continue
            for name, value in sample.values.items():
                key = (group, sample.peer, sample.mode, name)
                if sample.rep:
                    self._warm[key].append(value)
                else:
                    self._cold[key] = value

    def of(self, group: str, peer: str, mode: Mode, figure: str) -> Spread | None:
        """Over the timed repetitions."""
        return spread(self._warm.get((group, peer, mode, figure), ()))

    def repetitions(self) -> dict[str, int]:
        """Timed repetitions of each group, of the peer and mode that has fewest; memory, which has one, apart."""
        found: dict[str, int] = {}
        for (group, _, mode, _), values in self._warm.items():
            if mode != "memory":
                found[group] = min(found.get(group, len(values)), len(values))
        return found

    def cold(self, group: str, peer: str, mode: Mode, figure: str) -> float | None:
        """The first time: worker processes start, memory is faulted in."""
        return self._cold.get((group, peer, mode, figure))

    def exact(self, peer: str) -> tuple[int, int]:
        """How many checkpoints were compared with what they should hold, and how many of them were it."""
        return len(self._exact.get(peer, ())), sum(self._exact.get(peer, ()))

    def ratio(self, a: str, b: str, mode: Mode, figure: str) -> float | None:
        """Median of `a` over median of `b`, from the group that holds `b` in its own right.

        None if they never met, or `b` took no time at all.
        """
        group = self.home(b, mode, figure)
        if group is None:
            return None
        ours, theirs = self.of(group, a, mode, figure), self.of(group, b, mode, figure)
        if ours is None or theirs is None or theirs.median <= 0:
            return None
        return ours.median / theirs.median

    def home(self, peer: str, mode: Mode, figure: str) -> str | None:
        """The group whose figure of this peer counts: the first that has one; company comes later."""
        names = (group for group, peers in self.groups.items() if peer in peers)
        return next((group for group in names if (group, peer, mode, figure) in self._warm), None)

    def best(self, peers: Iterable[str], mode: Mode, figure: str) -> tuple[str, Spread] | None:
        """The peer with the least median."""
        found = []
        for peer in peers:
            group = self.home(peer, mode, figure)
            known = group and self.of(group, peer, mode, figure)
            if known:
                found.append((peer, known))
        return min(found, key=lambda item: item[1].median, default=None)
