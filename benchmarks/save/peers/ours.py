"""This project's save path, without the trainer around it: staging, saver process, digests, dual write."""

import importlib
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.save.peers.base import Peer
from benchmarks.save.workload import Workload
from verl_slurm.dcp.loader import load_tensors

__all__ = ["Ours", "OursEager"]


class Ours(Peer):
    """Lazy staging: `save` returns at once, the copy runs on, and `fence` waits for the rest of it."""

    lazy: ClassVar[bool] = True

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._saver: Any = None
        self._pending: Any = None

    def open(self, roots: tuple[Path, ...]) -> None:
        staging = importlib.import_module("verl_slurm.dcp.staging")
        self._saver = staging.StagedSaver(
            self.work.domains(), self.work.ranks, directories=roots, lazy=self.lazy
        )

    def save(self, directories: tuple[Path, ...]) -> None:
        self._pending = self._saver.begin(directories)

    def fence(self) -> None:
        self._saver.fence()

    def wait(self) -> None:
        self._pending.result()

    def load(self, directory: Path) -> None:
        if not self.work.optimizer.state:
            self.work.empty_state()
        load_tensors(directory, self.work.domains(), self.work.ranks)

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()


class OursEager(Ours):
    """Eager staging: `save` returns after the copy."""

    lazy = False
