"""torch.distributed.checkpoint: blocking, in a thread, in a process.

It plans, gathers metadata and can load into another topology, which the file-per-rank peers cannot. Its tied
weights are written twice (`lm_head`). It fsyncs its files, not their directory.
"""

from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.save.peers.base import Peer
from benchmarks.save.workload import Workload


class Dcp(Peer):
    """`dcp.save` with the state dicts that torch documents for it."""

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.work.model, self.work.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, directories: tuple[Path, ...]) -> None:
        save(self._state(), storage_writer=FileSystemWriter(directories[0]))

    def load(self, directory: Path) -> None:
        state = self._state()  # makes the optimizer's state by an empty update where there is none
        load(state, checkpoint_id=directory)
        set_state_dict(
            self.work.model,
            self.work.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class _Async(Dcp):
    """`dcp.async_save`, with a stager that keeps its buffers where `shared` is not None."""

    shared: ClassVar[bool | None]
    kind: ClassVar[AsyncCheckpointerType]

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._stager: DefaultStager | None = None
        self._future: Any = None

    def save(self, directories: tuple[Path, ...]) -> None:
        if self._stager is None and self.shared is not None:
            options = StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.shared,
                use_async_staging=False,  # needs a stream of an accelerator
                use_non_blocking_copy=False,
            )
            self._stager = DefaultStager(options)
        self._future = async_save(
            self._state(),
            checkpoint_id=directories[0],
            async_stager=self._stager,
            async_checkpointer_type=self.kind,
        )

    def wait(self) -> None:
        getattr(self._future, "upload_completion", self._future).result()
        self._future = None

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class DcpThread(_Async):
    """The writing thread fights the training thread for the interpreter's lock.

    Its staging buffers are private memory that stays: a fork would have to copy their page tables. So threads
    are kept apart from the peer that forks.
    """

    shared = False
    kind = AsyncCheckpointerType.THREAD


class DcpDefault(_Async):
    """With nothing said about staging, as most call it: each save faults its buffers in anew."""

    shared = None
    kind = AsyncCheckpointerType.THREAD


class DcpProcess(_Async):
    """A process a rank, each with torch (270 MiB and 1.5 to 2 s at its start: repetition 0)."""

    shared = True
    kind = AsyncCheckpointerType.PROCESS
