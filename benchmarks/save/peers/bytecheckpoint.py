"""ByteCheckpoint 0.0.2 with FSDP2.

Traps, found by reading and measuring:

* It wants torch <= 2.5, protobuf == 3.20.3 and grpcio == 1.69: install it without its dependencies
  (constraints/bench.txt). Its check of torch's version compares strings, and "2.13" < "2.6".
* It replaces parts of torch.distributed.checkpoint when it is imported, which changes DCP for every other peer:
  hence processes of its own.
* `fast_saving` is never asynchronous through `FSDP2Checkpointer`: the cached plan is looked up before the
  planner knows its state dict, so it always misses, and a miss takes the blocking path. What is measured is
  what a user of that function gets.
* It announces no completion. `wait` looks for futures in its storage engine by name.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from bytecheckpoint import FSDP2Checkpointer
from bytecheckpoint.workflow.state_dict import save_state_dict

from benchmarks.save.peers.base import Peer


class ByteCheckpoint(Peer):
    """`FSDP2Checkpointer.save(..., fast_saving=True)`."""

    def _parts(self) -> dict[str, Any]:
        return {"model": self.work.model, "optimizer": self.work.optimizer}

    def save(self, directories: tuple[Path, ...]) -> None:
        FSDP2Checkpointer.save(str(directories[0]), self._parts(), fast_saving=True)

    def wait(self) -> None:
        engine = save_state_dict._store_engine
        for name in dir(engine):
            value = getattr(engine, name, None)
            if "future" in name and isinstance(value, dict):
                for future in [future for futures in value.values() for future in futures or []]:
                    future.result()
        dist.barrier()

    def load(self, directory: Path) -> None:
        FSDP2Checkpointer.load(str(directory), self._parts(), fast_loading=False)
