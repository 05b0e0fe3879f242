"""Two ranks on two nodes, in one process: a thread and a saver each."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.faults.tracing import InProcess
from tests.save.parts import Parts, contents, provenance, runtime
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.save.ranks import staging
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.saver import CheckpointSaver, LocalPlace, SaveContents, SavedCheckpoint


class Ranks(Collective):
    """A Collective on a group that is not registered with torch (one process holds all ranks)."""

    def __init__(self, store: Any, rank: int, world_size: int, depth: str = "0") -> None:
        group: Any = dist.ProcessGroupGloo(dist.PrefixStore(depth, store), rank, world_size)
        self._group, self._store, self._depth, self._others = group, store, depth, 0
        self.rank, self.world_size = rank, world_size

    def another(self) -> "Ranks":
        self._others += 1
        return Ranks(self._store, self.rank, self.world_size, f"{self._depth}.{self._others}")

    def max(self, values: Any) -> list[int]:
        return [max(column) for column in zip(*self._all(list(values)), strict=True)]

    def gather(self, payload: bytes) -> list[bytes]:
        return [bytes(one) for one in self._all(list(payload))]

    def gather_to_first(self, payload: bytes) -> list[bytes]:
        parts = self.gather(payload)
        return [] if self.rank else parts

    def share(self, payload: bytes, *, source: int) -> bytes:
        return self.gather(payload)[source]

    def _all(self, numbers: list[int]) -> list[list[int]]:
        import torch

        lengths = self._gathered(torch.tensor([len(numbers)]))
        room = torch.zeros(max(int(length) for length in lengths), dtype=torch.int64)
        room[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        return [
            part[: int(length)].tolist() for part, length in zip(self._gathered(room), lengths, strict=True)
        ]

    def _gathered(self, tensor: Any) -> list[Any]:
        parts = [tensor.clone() for _ in range(self.world_size)]
        if tensor.numel():
            self._group.allgather([parts], [tensor]).wait()
        return parts


class Nodes:
    """A run of two ranks, each on a node of its own with a disk of its own."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(private_dir(root / "run"))
        self.disks = [root / f"n{number}" / "parts" for number in range(2)]
        store = dist.HashStore()
        self._savers: list[CheckpointSaver] = [None, None]  # type: ignore[list-item]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "SaverProcess", InProcess)
            self._on_both(lambda rank: self._make(store, rank))

    def begin(self, step: int, told: Callable[[int, SavedCheckpoint], None] | None = None) -> list[Any]:
        """A save; what each rank hears in the end, as futures."""

        def one(rank: int) -> Any:
            whole = contents(step, runtime(step, rank=rank, world_size=2))
            mine = SaveContents(runtime=whole.runtime, texts=whole.texts if rank == 0 else {})
            hear = None if told is None else lambda done: told(rank, done)
            return self._savers[rank].begin(mine, on_kept=hear)

        return self._on_both(one)

    def close(self) -> None:
        self._on_both(lambda rank: self._savers[rank].close())

    def _make(self, store: Any, rank: int) -> None:
        self._savers[rank] = CheckpointSaver(
            self.paths,
            Parts().tensors(),
            provenance(),
            Ranks(store, rank, 2),
            attempt_check=lambda: None,
            local=LocalPlace(directory=self.disks[rank], is_first=True, keep=2),
        )

    def _on_both(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None, None]

        def one(rank: int) -> None:
            results[rank] = work(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results
