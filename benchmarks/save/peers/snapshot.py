"""torchsnapshot: its asynchronous take, of each rank's local tensors.

Unmaintained since 2024 (the nightly of that July is the last that knows this torch). It patches asyncio for the
whole process (nest_asyncio): hence processes of its own. What it copies it copies before `async_take` returns.
"""

from pathlib import Path
from typing import Any

from torchsnapshot import Snapshot, StateDict

from benchmarks.save.peers.base import Peer
from benchmarks.save.workload import Workload


class TorchSnapshot(Peer):
    """`Snapshot.async_take`; its `wait` is the commit."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._pending: Any = None

    def save(self, directories: tuple[Path, ...]) -> None:
        state = {"state": StateDict(**self.work.locals())}
        self._pending = Snapshot.async_take(str(directories[0]), state)

    def wait(self) -> None:
        self._pending.wait()

    def load(self, directory: Path) -> None:
        if not self.work.optimizer.state:
            self.work.empty_state()
        Snapshot(str(directory)).restore({"state": StateDict(**self.work.locals())})
