"""Runs of a framework's callback, one attempt after another in the same process."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.builders import write_config
from tests.fakes.daemon import Daemon
from tests.processes import free_port, python_path
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.loops.session import Session
from verl_slurm.wire.messages import FromRank, SaveRequest


def stop() -> SaveRequest:
    return SaveRequest(request_id=1, stop=True)


def save() -> SaveRequest:
    return SaveRequest(request_id=1, stop=False)


class Clock:
    """A session's, which stands still but for `seconds +=`."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Listening(Daemon):
    """Keeps how long its rank was silent at most."""

    longest_silence_s = _spoken_at = 0.0

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def send(self, message: FromRank) -> None:
        super().send(message)
        silence_s, self._spoken_at = self._clock() - self._spoken_at, self._clock()
        self.longest_silence_s = max(self.longest_silence_s, silence_s)


class Run:
    """A run's directory, and one life of it after another."""

    def __init__(self, root: Path, every_steps: int = 1000) -> None:
        root.mkdir(mode=0o700, parents=True)
        self.paths = RunPaths(root)
        write_config(self.paths, every_steps=every_steps)

    def checkpoints(self) -> list[Path]:
        """The committed ones, oldest first."""
        return sorted(path for path in self.paths.checkpoints.glob("step_*"))

    def life(self, daemon: Daemon, clock: Callable[[], float] = time.monotonic) -> Session:
        """The session of the next attempt, which goes on from the newest checkpoint."""
        attempt = take_attempt(self.paths, job_id="1", restart=0).attempt
        there = self.checkpoints()
        return Session(
            daemon,
            rank=0,
            world_size=1,
            paths=self.paths,
            attempt=attempt,
            resume=there[-1] if there else None,
            clock=clock,
        )


def two_ranks(program: Path, *argv: str) -> None:
    """Two processes as torchrun would start them, to their end; both have to end well."""
    environ = dict(os.environ) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"} | python_path()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), *argv],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=240)
        assert rank.returncode == 0, said
