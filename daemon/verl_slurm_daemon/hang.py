"""When is silence a hang? Pure: told of safe points and of the time, says when too much of it has passed.

The pace is the run's own: the longest that any rank has needed from one safe point to the next, in this generation. A
rank that needs `factor` times that is hung, but none is before `floor_s`: the first evaluation, a compilation or a
slow disk may take longer than anything before. Until a rank's first safe point (models are loaded, communicators
made, the ledger replayed) there is no pace, and `load_s` counts. It counts, too, from the start of a save to the next
safe point: training may have to wait there for the save before, and at the end for the last one, as long as storage
takes. Such a wait is no pace either.

When all are done their processes have `floor_s` to end: communicators that are taken down may hang, too.

Ranks wait for one another in collectives, so where one hangs all fall silent soon. Named is the one that has passed
the fewest safe points; that one the others wait for.
"""

from dataclasses import dataclass, field

__all__ = ["HangWatch", "Silence"]


@dataclass(frozen=True)
class Silence:
    """One rank, silent for too long."""

    rank: int
    seconds: float
    limit_s: float
    longest_s: float
    safe_points: int
    """It has passed so many; the foremost rank: `foremost`."""
    foremost: int
    done: bool = False
    """All ranks are, and their processes do not end."""

    @property
    def words(self) -> str:
        if self.done:
            return f"all ranks are done since {self.seconds:.0f} s, and their processes do not end"
        pace = f"the longest before was {self.longest_s:.1f} s" if self.longest_s else "and none before"
        return (
            f"rank {self.rank} has passed no safe point for {self.seconds:.0f} s ({pace}, limit {self.limit_s:.0f} s); "
            f"it is at its safe point {self.safe_points}, the foremost rank at {self.foremost}"
        )


@dataclass
class _Rank:
    at: float
    safe_points: int = 0
    saves: bool = False


@dataclass
class HangWatch:
    """One generation's. Times are monotonic seconds.

    Called by: effects.
    """

    factor: float
    floor_s: float
    load_s: float
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _longest_s: float = 0.0
    _done_at: float | None = None

    def started(self, rank: int, now: float) -> None:
        """It has spoken for the first time."""
        self._ranks[rank] = _Rank(now)

    def passed(self, rank: int, safe_points: int, now: float) -> None:
        """A safe point; several at once count as one."""
        before = self._ranks.get(rank)
        if before is not None and before.safe_points and not before.saves:
            self._longest_s = max(self._longest_s, now - before.at)
        self._ranks[rank] = _Rank(now, safe_points)

    def saves(self, rank: int, now: float) -> None:
        """It begins a save, and may wait for storage before its next safe point."""
        before = self._ranks.get(rank)
        self._ranks[rank] = _Rank(now, before.safe_points if before else 0, saves=True)

    def finished(self, rank: int, now: float) -> None:
        """Nothing more is to be expected of it but its end."""
        self._ranks.pop(rank, None)
        self._done_at = now

    def limit_s(self, rank: int) -> float:
        """So long may this rank be silent now."""
        known = self._ranks.get(rank)
        if known is None or not known.safe_points:
            return self.load_s
        by_pace = max(self.floor_s, self.factor * self._longest_s)
        return max(by_pace, self.load_s) if known.saves else by_pace

    def next_look_s(self, now: float) -> float:
        """Seconds until the first of them could be hung. At most `floor_s`: a rank that loads now may by then train,
        and have a shorter limit."""
        dues = [known.at + self.limit_s(rank) - now for rank, known in self._ranks.items()]
        return max(min([*dues, self.floor_s]), 0.0)

    def silence(self, now: float) -> Silence | None:
        """The rank that the others wait for, if any has been silent for too long."""
        if not self._ranks and self._done_at is not None and now - self._done_at >= self.floor_s:
            return Silence(-1, now - self._done_at, self.floor_s, self._longest_s, 0, 0, done=True)
        if not any(now - known.at >= self.limit_s(rank) for rank, known in self._ranks.items()):
            return None
        rank, known = min(self._ranks.items(), key=lambda item: (item[1].safe_points, item[1].at, item[0]))
        return Silence(
            rank=rank,
            seconds=now - known.at,
            limit_s=self.limit_s(rank),
            longest_s=self._longest_s,
            safe_points=known.safe_points,
            foremost=max(other.safe_points for other in self._ranks.values()),
        )
