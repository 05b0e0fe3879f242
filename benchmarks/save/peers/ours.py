"""This project, as its trainer calls it: staging, saver process, digests, manifest, commit."""

from concurrent.futures import Future
from pathlib import Path

import torch

from benchmarks.save.peers.base import Peer
from benchmarks.save.run_directory import all_domains, contents, make_saver, only_checkpoint
from benchmarks.save.workload import Workload
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.save.ranks.loader import read_tensors
from verl_slurm.save.ranks.saver import CheckpointSaver, SavedCheckpoint
from verl_slurm.save.ranks.tensors import initialise_adamw


class Ours(Peer):
    """Lazy staging: `save` returns at once, the copy runs on, and `fence` waits for the rest of it."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._saver: CheckpointSaver | None = None
        self._pending: Future[SavedCheckpoint] | None = None

    def open(self, directories: tuple[Path, ...]) -> None:
        self._saver = make_saver(directories[0], self.work, *directories[1:])

    def save(self, directories: tuple[Path, ...]) -> None:
        assert self._saver is not None
        self._pending = self._saver.begin(contents(self.work))

    def fence(self) -> None:
        assert self._saver is not None
        self._saver.fence()

    def wait(self) -> None:
        assert self._pending is not None
        self._pending.result()

    def load(self, directory: Path) -> None:
        """As a resume does it: every byte is checked on the way, and the optimizer's state made before."""
        if not self.work.optimizer.state:
            initialise_adamw(self.work.optimizer, to_be_loaded=True)
        reader = CheckpointReader(only_checkpoint(directory))
        read_tensors(reader, all_domains(self.work, torch.empty(2)), self.work.ranks)

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()


class OursEager(Ours):
    """Eager staging: `save` returns after the copy."""

    def save(self, directories: tuple[Path, ...]) -> None:
        super().save(directories)
        super().fence()
