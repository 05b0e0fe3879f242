"""Names ranks that work longer than the others between two safe points. Pure: it is told of safe points.

Ranks agree at each safe point, so all of them pass it together, and times between safe points are equal: the fast ones
wait. What differs is the work: each rank reports the seconds that it has spent outside of that agreement
(`Progress.own_s`). Ranks that wait for one another inside the work, in collectives of their models, share the time of
the slowest, and cannot be told apart here.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_LEAST_SAFE_POINTS = 3
_LEAST_S = 20.0
"""A window has at least so many safe points, and so much work of the slowest rank: noise evens out."""
_IN_A_ROW = 3
"""Windows that begin, or end, what is told."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow, or was until now."""

    rank: int
    slow: bool
    own_s: float
    """Its work from one safe point to the next, in the newest window."""
    others_s: float
    """The median of the other ranks'."""

    @property
    def words(self) -> str:
        compared = f"{self.own_s:.3g} s from safe point to safe point, the others {self.others_s:.3g} s"
        if not self.slow:
            return f"rank {self.rank} is as fast as the others again: {compared}"
        return (
            f"rank {self.rank} works {self.own_s / self.others_s:.1f} times as long as the others: {compared}"
        )


@dataclass
class StragglerWatch:
    """Watches the ranks of one restart, of which `num_ranks` report."""

    factor: float
    """Slow is a rank that works this many times as long as the median of the others. 0: nothing is told."""
    num_ranks: int
    _marks: dict[int, tuple[int, float]] = field(default_factory=dict)
    _newest: dict[int, tuple[int, float]] = field(default_factory=dict)
    _enough: set[int] = field(default_factory=set)
    """Ranks that have passed `_LEAST_SAFE_POINTS` in this window."""
    _longest_s: float = 0.0
    """Work of the slowest rank in this window."""
    _in_a_row: dict[int, int] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)

    def passed(self, rank: int, safe_points: int, own_s: float) -> list[Straggler]:
        """Records a rank's safe points, and its seconds of work since the first of them; returns what is new."""
        if not self.factor or self.num_ranks < 2:
            return []
        self._newest[rank] = (safe_points, own_s)
        # A window begins where all ranks train; loading and warming up belong to none.
        marked_points, marked_s = self._marks.setdefault(rank, (safe_points, own_s))
        # Of this rank alone: each of thousands reports once a second, and a look at all of them would be too much.
        if safe_points - marked_points >= _LEAST_SAFE_POINTS:
            self._enough.add(rank)
        self._longest_s = max(self._longest_s, own_s - marked_s)
        if len(self._enough) < self.num_ranks or self._longest_s < _LEAST_S:
            return []
        work_s = {
            one: (own - self._marks[one][1]) / (points - self._marks[one][0])
            for one, (points, own) in self._newest.items()
        }
        self._marks, self._longest_s = dict(self._newest), 0.0
        self._enough.clear()
        return self._judge(work_s)

    def _judge(self, work_s: Mapping[int, float]) -> list[Straggler]:
        news = []
        ordered = sorted(work_s.values())
        for rank in sorted(work_s):
            own_s = work_s[rank]
            others_s = _median_without(ordered, own_s)
            slow = others_s > 0 and own_s > self.factor * others_s
            # Counted as long as it differs from what was told last.
            differs = slow is not (rank in self._told)
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1 if differs else 0
            if self._in_a_row[rank] >= _IN_A_ROW:
                self._in_a_row[rank] = 0
                (self._told.add if slow else self._told.discard)(rank)
                news.append(Straggler(rank, slow, own_s, others_s))
        return news

    @property
    def slow(self) -> tuple[int, ...]:
        """Returns the ranks that are slow now."""
        return tuple(sorted(self._told))


def _median_without(ordered: Sequence[float], own: float) -> float:
    """Returns the median of sorted values, `own`, which is one of them, left out. O(log n)."""
    place, count = bisect_left(ordered, own), len(ordered) - 1

    def at(number: int) -> float:
        return ordered[number if number < place else number + 1]

    return at(count // 2) if count % 2 else (at(count // 2 - 1) + at(count // 2)) / 2
