"""A rank that trains nothing, in the place of the trainer's on a real Slurm (`no_torch/` on PYTHONPATH).

It stands for the trainer where a claim is about the daemon and Slurm: a real rank imports torch for ten seconds of a
processor at each start. Its steps are pauses, its rollouts zeros, and its checkpoints small and whole, through the real
commit. What it is asked for ends its step. Rank 0 saves; the others wait for it, and do not count steps of their own.
"""

import os
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

import numpy as np

from tests.checkpoint.sealed import save_sealed
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import load_resolved
from verl_slurm.config.schema import RunConfig
from verl_slurm.loops.session import Session
from verl_slurm.runtime_state.ledger import Ledger
from verl_slurm.wire.client import RankClient
from verl_slurm.wire.environment import CONTROL_VARIABLE
from verl_slurm.wire.messages import Progress, RankStarted, SaveRequest

SAFE_POINTS = 12
"""In each of the two phases of a step."""
PAUSE_S = 0.1


class Rank:
    """One rank of `paths`, after `step` whole steps."""

    def __init__(self, paths: RunPaths, attempt: int, step: int) -> None:
        self._paths, self._step, self._safe_points = paths, step, 0
        self._config: RunConfig = load_resolved(paths.run_yaml)
        rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        line = RankClient.connect(Path(os.environ[CONTROL_VARIABLE]))
        line.send(RankStarted(rank=rank, pid=os.getpid()))
        self._session = Session(line, rank=rank, world_size=world_size, paths=paths, attempt=attempt)

    def run(self) -> None:
        if self._session.rank:
            self._follow()
            return
        # A run that said it had rollouts, and has no ledger, does not begin again by itself.
        with Ledger(self._paths, self._session.attempt, 0) as ledger:
            ledger.append(self._step, 0, {"response": np.zeros(1, np.int32)})
        while self._step < (last := self._config.train.steps):
            began = time.monotonic()
            request = self._train_step()
            self._step += 1
            self._say("step_end", 0)
            self._session.log_step({"step": self._step, "reward": 0.5, "step_s": time.monotonic() - began})
            if request or self._step == last or self._step % self._config.checkpoint.every_steps == 0:
                self._save(request.request_id if request else 0)
            if request and request.stop:
                self._session.stopped(request.request_id)
                return
        self._session.finished(self._step)

    def _train_step(self) -> SaveRequest | None:
        for phase in ("generate", "update"):
            for index in range(SAFE_POINTS):
                if request := self._pass_safe_point(phase, index):
                    return request
        return None

    def _pass_safe_point(self, phase: str, index: int) -> SaveRequest | None:
        self._say(phase, index)
        time.sleep(PAUSE_S)
        return self._session.request()

    def _say(self, phase: str, index: int) -> None:
        self._safe_points += 1
        said = Progress(
            rank=self._session.rank,
            step=self._step,
            phase=phase,  # type: ignore[arg-type]
            index=index,
            safe_points=self._safe_points,
            new_rollouts=int(self._session.rank == 0),
        )
        self._session.line.send(said)

    def _save(self, request_id: int) -> None:
        attempt = self._session.attempt
        self._session.save_started(request_id, self._step)
        path = save_sealed(
            self._paths,
            self._step,
            None,
            attempt=attempt,
            fence=lambda: require_attempt(self._paths, attempt),
        )
        self._session.saved(request_id, path.name, seconds=0.1, num_bytes=1)

    def _follow(self) -> None:
        while not self._paths.checkpoint(self._config.train.steps).exists():
            if request := self._pass_safe_point("generate", 0):
                asked = time.time()
                self._session.save_started(request.request_id, self._step)
                # Rank 0 may have been the first to see the request.
                while not any(
                    path.stat().st_mtime > asked - 1 for path in self._paths.checkpoints.glob("step_*")
                ):
                    time.sleep(PAUSE_S)
                self._session.saved(request.request_id, "", seconds=0.1, num_bytes=1)
                if request.stop:
                    self._session.stopped(request.request_id)
                    return
        self._session.finished(self._config.train.steps)


def main(words: list[str]) -> None:
    parser = ArgumentParser()
    for name, kind in (("--run", Path), ("--attempt", int), ("--resume", str)):
        parser.add_argument(name, type=kind, required=True)
    given = parser.parse_args(words)
    Rank(RunPaths(given.run), given.attempt, int(given.resume[5:11]) if given.resume else 0).run()


if __name__ == "__main__":
    main(sys.argv[1:])
