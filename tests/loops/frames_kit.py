"""A daemon as a framework's callback meets it, in the same process: it asks, and writes down what it is told."""

import threading
from pathlib import Path
from typing import TypeVar

from tests.builders import write_config
from verl_slurm.base.fence import take_epoch
from verl_slurm.base.paths import RunPaths
from verl_slurm.loops.session import Session
from verl_slurm.wire.messages import FromRank, Progress, SaveFailed, SaveRequest

Message = TypeVar("Message")


class Daemon:
    """A `RankLine`. `asks[7]` is there to be seen at the end of step 7."""

    def __init__(self, asks: dict[int, SaveRequest] | None = None) -> None:
        self.asks, self.told = asks or {}, list[FromRank]()
        self._newest: SaveRequest | None = None
        self.refused_a_save = threading.Event()

    def send(self, message: FromRank) -> None:
        self.told.append(message)
        if isinstance(message, SaveFailed):
            self.refused_a_save.set()
        if isinstance(message, Progress):
            self._newest = self.asks.get(message.step, self._newest)

    def request(self) -> SaveRequest | None:
        return self._newest

    def now(self, request: SaveRequest) -> None:
        """Ask in the middle of a step."""
        self._newest = request

    def heard(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.told if isinstance(message, kind)]

    def kinds(self) -> list[str]:
        """What it was told, in order, without the signs of life."""
        return [type(message).__name__ for message in self.told if not isinstance(message, Progress)]

    def steps(self) -> list[int]:
        return [message.step for message in self.told if isinstance(message, Progress)]


def stop() -> SaveRequest:
    return SaveRequest(request_id=1, stop=True)


def save() -> SaveRequest:
    return SaveRequest(request_id=1, stop=False)


class Run:
    """A run's directory, and one life of it after another."""

    def __init__(self, root: Path, every_steps: int = 1000) -> None:
        root.mkdir(mode=0o700, parents=True)
        self.paths = RunPaths(root)
        write_config(self.paths, every_steps=every_steps)

    def checkpoints(self) -> list[Path]:
        """The committed ones, oldest first."""
        return sorted(path for path in self.paths.checkpoints.glob("step_*"))

    def life(self, daemon: Daemon) -> Session:
        """The session of the next incarnation, which goes on from the newest checkpoint."""
        epoch = take_epoch(self.paths, job_id="1", restart=0).epoch
        there = self.checkpoints()
        return Session(
            daemon, rank=0, world_size=1, paths=self.paths, epoch=epoch, resume=there[-1] if there else None
        )
