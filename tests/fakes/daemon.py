"""Daemons as the line of a rank meets them: they ask what a test has them ask, and keep what they are told.

They stand for the agent and the lead beyond it. No socket, no page and no process is involved, nothing is decided, and
nobody dies of silence. A real daemon asks when Slurm does, which no test can place at one safe point of one step.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from verl_slurm.wire.messages import FromRank, Progress, RankNotice, RankSaveFailed, SaveRequest

Message = TypeVar("Message")


class Daemon:
    """A `RankLine`. It asks `asked`, which becomes `asks[7]` at the end of step 7."""

    def __init__(self, asks: dict[int, SaveRequest] | None = None) -> None:
        self.asks, self.asked = asks or {}, None
        self.told = list[FromRank]()
        self.refused_a_save = threading.Event()

    def send(self, message: FromRank) -> None:
        self.told.append(message)
        if isinstance(message, RankSaveFailed):
            self.refused_a_save.set()
        if isinstance(message, Progress):
            self.asked = self.asks.get(message.step, self.asked)

    def request(self) -> SaveRequest | None:
        return self.asked

    def waited(self, seconds: float) -> None:
        """Nobody here compares ranks."""

    def heard(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.told if isinstance(message, kind)]

    def notices(self, topic: str) -> list[str]:
        return [notice.text for notice in self.heard(RankNotice) if notice.topic == topic]

    def kinds(self) -> list[str]:
        """What it was told, in order, without the signs of life."""
        return [type(message).__name__ for message in self.told if not isinstance(message, Progress)]

    def steps(self) -> list[int]:
        return [message.step for message in self.heard(Progress) if message.phase == "step_end"]


class AtSafePoint(Daemon):
    """Asks for one save at safe point `at` of this process (0: before any work; None: never) and at all after it.

    Args:
        act: is called there first, e.g. to end the process.
    """

    def __init__(
        self, at: int | None = None, *, stop: bool = True, act: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__()
        self._at, self._stop, self._act, self._polls = at, stop, act, 0

    def request(self) -> SaveRequest | None:
        number, self._polls = self._polls, self._polls + 1  # the loop polls exactly once at each safe point
        if self._at is None or number < self._at:
            return None
        self._act()
        return SaveRequest(request_id=1, stop=self._stop)
