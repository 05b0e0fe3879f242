"""A daemon as one speaking process of a loop meets it: it asks what a test has it ask, and remembers what it hears."""

from typing import Any

from verl_slurm.wire.messages import FromRank, Progress, SaveRequest


class Line:
    """A `RankLine`."""

    def __init__(self) -> None:
        self.asked: SaveRequest | None = None
        self.heard: list[FromRank] = []

    def send(self, message: FromRank) -> None:
        self.heard.append(message)

    def request(self) -> SaveRequest | None:
        return self.asked

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def kinds(self) -> list[type]:
        """What it heard, in order, without the signs of life."""
        return [type(message) for message in self.heard if not isinstance(message, Progress)]
