"""NVIDIA Resiliency Extension 0.4.1's asynchronous checkpoint, on a CPU.

Traps, found by measuring:

* It calls `torch.cuda.synchronize` and `torch.cuda.current_device` unconditionally: `_without_cuda` makes
  them no-ops. That changes nothing of what is measured on a CPU.
* Fork: the snapshot is the kernel's copy-on-write. `save` is fast whatever the size, and training pays later,
  a page fault at each page it writes while the child still has it. Look at "lost", not only at the stall.
* Worker: on a GPU it copies device to host in its worker. On CPU tensors `to("cpu")` is no copy, and the
  worker shares memory with the trainer: the shipped code writes a torn snapshot (seen as tensors that differ).
  `_CopyingWriter` gives it the copy it would make. It moves the live tensors into shared memory to reach the
  worker, after which a fork of the same process copies nothing any more: hence processes of its own.
* Completion is asked for by polling; finishing (gathering results, writing metadata) is done on the training
  thread, in `wait`. Its seconds are not counted as stall here: to its favour.
* The first finish waits for a spawned manager process: repetition 0.
"""

import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt import state_dict_saver
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from benchmarks.save.peers.dcp import Dcp
from benchmarks.save.workload import Workload

_POLL_S = 0.005


def _without_cuda() -> None:
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_, **__: None
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


class _CopyingWriter(FileSystemWriterAsync):  # type: ignore[misc]
    """Stands in for the device-to-host copy. By name, so that the worker can unpickle it."""

    @staticmethod
    def preload_tensors(write_buckets: Any, non_blocking: bool = True) -> Any:
        return [
            (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (data, tensors) in write_buckets
        ]


class NvrxFork(Dcp):
    """Copy-on-write by fork, DCP's format, cached plans."""

    persistent: ClassVar[bool] = False
    writer: ClassVar[type] = FileSystemWriterAsync

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        _without_cuda()
        self._queue: Any = None
        self._cache: Any = None

    def save(self, directories: tuple[Path, ...]) -> None:
        if self._queue is None:
            self._queue = AsyncCallsQueue(persistent=self.persistent)
            self._cache = state_dict_saver.CheckpointMetadataCache()
        planned = state_dict_saver.save_state_dict_async_plan(
            self._state(),
            self.writer(str(directories[0]), thread_count=1),
            planner=DefaultSavePlanner(),
            enable_cache=True,
            metadata_cache=self._cache,
        )
        function, preload, arguments = planned[0].get_save_function_and_args()
        finish = [lambda: state_dict_saver.save_state_dict_async_finalize(*planned)]
        self._queue.schedule_async_request(AsyncRequest(function, arguments, finish, preload_fn=preload))

    def wait(self) -> None:
        while self._queue.get_num_unfinalized_calls():
            caller = self._queue.async_calls[0].async_caller
            if caller.is_current_async_call_done(blocking=False, no_dist=True):
                _, _, request = self._queue.async_calls.popleft()
                request.execute_finalize_fns(validate_matching_call_idx=True)
            else:
                time.sleep(_POLL_S)

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()


class NvrxWorker(NvrxFork):
    """A process that stays, with the copy it would make on a GPU."""

    persistent = True
    writer = _CopyingWriter
