"""Asks for a medium's free space (statvfs), and reports each change of its state over the saves once."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from verl_slurm.checkpoint.decide.storage import (
    FreeSpace,
    HealthKind,
    Need,
    Outcome,
    Room,
    judge_health,
    judge_room,
    need_of_next,
)

_REMEMBERED = 64


def free_space(path: Path) -> FreeSpace:
    """Asks about `path`, or its nearest existing parent. Never raises; blocks as long as the file system."""
    # The place of a save need not exist yet, and statvfs needs something that does. lexists: a dangling link is a place
    # too.
    place = path
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        # On an NFS without its server it returns when the server is back.
        stat, device = os.statvfs(place), os.stat(place).st_dev
    # An answer that cannot be had is a problem to report and no reason to refuse the save.
    except OSError as error:
        return FreeSpace(problem=f"{place} could not be asked: {error.strerror}")
    # bavail, not bfree: blocks reserved for root are not ours. A file system that reports no blocks, or no inodes, at
    # all does not count them.
    return FreeSpace(
        bytes=stat.f_bavail * stat.f_frsize if stat.f_blocks else None,
        inodes=stat.f_favail if stat.f_files else None,
        device=device,
    )


def room_for(path: Path, need: Need) -> Room:
    """Judges whether `need` fits where `path` lies or will lie."""
    return judge_room(free_space(path), need)


class StorageNotice(NamedTuple):
    """One line for the log and the journal; `loud`: something is wrong."""

    text: str
    loud: bool


class StorageWatch:
    """Watches one medium. `decide/storage.py` judges.

    Args:
        path: the place of the saves; need not exist yet.
        estimate: for the first save, before one was measured.
        earlier: (bytes, seconds) of saves of earlier processes, oldest first.

    Attributes:
        room: the answer to the last `before_save`; None: none yet.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        estimate: Need,
        earlier: Iterable[tuple[int, float]] = (),
        ask: Callable[[Path, Need], Room] = room_for,
    ) -> None:
        self._name, self._path, self._need, self._ask = name, path, estimate, ask
        self._outcomes = [Outcome(num_bytes=count, seconds=seconds) for count, seconds in earlier]
        # A new process knows nothing yet, so the first healthy save after a start is no news.
        self._kind: HealthKind = "unknown"
        self.room: Room | None = None

    def before_save(self) -> tuple[StorageNotice, ...]:
        """Asks whether the next save fits. The save is tried anyway: only the write itself is proof."""
        # Only a change is said: a full disk would otherwise be reported at every save.
        before = None if self.room is None else self.room.enough
        self.room = room = self._ask(self._path, self._need)
        if room.enough is False and before is not False:
            text = f"{self._name} has no room for the next save: {room.reason}"
            return (StorageNotice(text, loud=True),)
        if room.enough and before is False:
            return (StorageNotice(f"{self._name} has room again: {room.reason}", loud=False),)
        return ()

    def saved(self, num_bytes: int, seconds: float, num_files: int) -> tuple[StorageNotice, ...]:
        """Records a successful save; the next is expected to be like it."""
        self._need = need_of_next(num_bytes, num_files)
        return self._heard(Outcome(num_bytes=num_bytes, seconds=seconds))

    def failed(self, reason: str) -> tuple[StorageNotice, ...]:
        """Records a save that failed on this medium."""
        return self._heard(Outcome(error=reason or "for an unknown reason"))

    def _heard(self, outcome: Outcome) -> tuple[StorageNotice, ...]:
        # Bounded: a run of months makes thousands of saves, and the judgement needs the recent ones.
        self._outcomes = [*self._outcomes, outcome][-_REMEMBERED:]
        health = judge_health(self._outcomes)
        before, self._kind = self._kind, health.kind
        bad = ("slow", "failing")
        if health.kind == before or (health.kind not in bad and before not in bad):
            return ()
        words = {
            "slow": "is SLOW",
            "failing": "is FAILING",
            "well": "is well again",
            "unknown": "works again",
        }
        text = f"{self._name} {words[health.kind]}: {health.reason}"
        return (StorageNotice(text, loud=health.kind in bad),)
