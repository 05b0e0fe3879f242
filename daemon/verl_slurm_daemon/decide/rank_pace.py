"""Decides when silence is a hang, and which ranks are slow. Pure: it is told of safe points and of the time.

The pace is the run's own: the longest time that any rank has needed between two safe points, in this restart. A rank
that needs `factor` times that is hung, but never before `floor_s`: the first evaluation, a compilation or a slow disk
may take longer than anything before. Until a rank's first safe point, and from the start of a save to the next safe
point, `load_s` counts. A loop that is not ours reports the batches of an evaluation, which may last. When all ranks are
done, their processes have `floor_s` to end.

Ranks agree at each safe point, so all of them pass it together, and times between safe points are equal: the fast ones
wait. What differs is the work: each rank reports the seconds that it has spent outside of that agreement
(`Progress.own_s`). Ranks that wait for one another inside the work, in collectives of their models, share the time of
the slowest, and cannot be told apart here.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl_slurm.base.errors import WAYS_IN

_LEAST_SAFE_POINTS = 3
_LEAST_S = 20.0
"""A window has at least so many safe points, and so much work of the slowest rank: noise evens out."""
_IN_A_ROW = 3
"""Windows that begin, or end, what is told."""


@dataclass(frozen=True)
class Silence:
    """Ranks that have been silent for too long."""

    ranks: tuple[int, ...]
    """The ranks with the fewest safe points. One: the others wait for it. Several: one of them hangs."""
    seconds: float
    limit_s: float
    longest_s: float
    safe_points: int
    """The number of safe points that they have passed; the foremost rank: `foremost`."""
    foremost: int
    key: str = "daemon.hang_floor_s"
    """What the limit is set by."""
    done: bool = False
    """All ranks are done, and their processes do not end."""
    spoke: bool = True
    """False: the programs of these ranks have not sent a message themselves."""

    @property
    def words(self) -> str:
        if self.done:
            return f"all ranks have been done for {self.seconds:.0f} s ({self.key}), and their processes do not end"
        pace = f"the longest before was {self.longest_s:.1f} s" if self.longest_s else "and none before"
        limit = f"({pace}, limit {self.limit_s:.0f} s: {self.key})"
        if not self.spoke:
            limit += f": the program has not called {WAYS_IN}"
        if len(self.ranks) == 1:
            where = f"it is at its safe point {self.safe_points}, the foremost rank at {self.foremost}"
            return f"rank {self.ranks[0]} has passed no safe point for {self.seconds:.0f} s {limit}; {where}"
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        where = f"all of them are at safe point {self.safe_points}: the stacks tell which one hangs"
        return f"ranks {shown} have passed no safe point for {self.seconds:.0f} s {limit}; {where}"


@dataclass
class _Rank:
    at: float
    safe_points: int = 0
    saves: bool = False
    trains: bool = False
    """The ranks are past loading: the time they need from here on counts as pace."""
    spoke: bool = True
    """Its program has sent a message itself."""


@dataclass
class HangWatch:
    """Watches the ranks of one restart. Times are monotonic seconds."""

    factor: float
    floor_s: float
    load_s: float
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _longest_s: float = 0.0
    _done_at: float | None = None

    def started(self, rank: int, now: float, by_program: bool = True) -> None:
        """Records the first message of a rank, for its program and by it: loading may take `load_s` from each."""
        self._ranks[rank] = _Rank(now, spoke=by_program)

    def passed(self, rank: int, safe_points: int, now: float) -> None:
        """Records a safe point; several at once count as one. With `safe_points` 0 the loop begins. The number of
        before is a sign of life between two: a batch of an evaluation."""
        before = self._ranks.get(rank)
        # Loading and waits for storage are no pace: one long wait would let a later hang pass for `factor` times as
        # long.
        # A guest's first step counts as pace: it may have one safe point in ten minutes, and the second step
        # is no faster.
        if before is not None and before.trains and not before.saves:
            self._longest_s = max(self._longest_s, now - before.at)
        self._ranks[rank] = _Rank(now, safe_points, trains=True)

    def saves(self, rank: int, now: float) -> None:
        """Records that the rank begins a save; it may wait for storage before its next safe point."""
        before = self._ranks.get(rank)
        self._ranks[rank] = _Rank(now, before.safe_points if before else 0, saves=True)

    def finished(self, rank: int, now: float) -> None:
        """Records that the rank is done: nothing follows but its end."""
        # A rank that has finished passes no more safe points, and must not count as behind.
        self._ranks.pop(rank, None)
        self._done_at = now

    def limit_s(self, rank: int) -> float:
        """Returns how many seconds this rank may be silent now."""
        return self._limit(rank)[0]

    def _limit(self, rank: int) -> tuple[float, str]:
        """Returns the limit, and the key that sets it."""
        known = self._ranks.get(rank)
        # Models are loaded, communicators made, the ledger replayed: there is no pace yet.
        if known is None or not known.safe_points:
            return self.load_s, "daemon.load_timeout_s"
        by_pace = max(self.floor_s, self.factor * self._longest_s)
        # A save may wait for the one before, and the last one of a run for itself, as long as storage takes.
        if known.saves and self.load_s >= by_pace:
            return self.load_s, "daemon.load_timeout_s"
        return by_pace, "daemon.hang_floor_s"

    def next_look_s(self, now: float) -> float:
        """Returns the seconds until the first rank could be hung; at most `floor_s`."""
        dues = [known.at + self.limit_s(rank) - now for rank, known in self._ranks.items()]
        # A rank that loads now may train by then, and have a shorter limit.
        return max(min([*dues, self.floor_s]), 0.0)

    def silence(self, now: float) -> Silence | None:
        """Returns the ranks that are behind, if any rank has been silent for too long."""
        # All are done: what remains is the end of their processes, and the teardown of communicators may hang, too.
        if not self._ranks and self._done_at is not None and now - self._done_at >= self.floor_s:
            return Silence((), now - self._done_at, self.floor_s, self._longest_s, 0, 0, done=True)
        if not any(now - known.at >= self.limit_s(rank) for rank, known in self._ranks.items()):
            return None
        # Ranks wait for one another in collectives: soon all are silent, and the one with the fewest safe points is
        # behind. Equal numbers tell nothing, so all of them are named, and the stacks have to tell.
        fewest = min(known.safe_points for known in self._ranks.values())
        behind = {rank: known for rank, known in self._ranks.items() if known.safe_points == fewest}
        # The longest silence; the rank number makes the choice the same each time.
        first = min(behind, key=lambda rank: (behind[rank].at, rank))
        limit_s, key = self._limit(first)
        return Silence(
            ranks=tuple(sorted(behind)),
            seconds=now - behind[first].at,
            limit_s=limit_s,
            key=key,
            longest_s=self._longest_s,
            safe_points=fewest,
            foremost=max(known.safe_points for known in self._ranks.values()),
            spoke=any(known.spoke for known in behind.values()),
        )


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
