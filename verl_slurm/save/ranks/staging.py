"""Copies live tensors into an arena, which the writer process makes durable. Training waits for the copy alone.

`begin` returns at once. The thread "staging" copies the tensors into the arena; until it has, they must not change in
place. `fence` waits for that, and stands before every optimizer update. An RL step spends most of its time generating,
with the weights as they are, so the fence hardly ever has to wait. Then the writer process hashes and writes the arena
(`save.writer.protocol`), and the thread waits for its answers.

The arena holds one state. A save that begins while the one before is being written waits for it.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.kernel_facts import available_memory
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.layout import Layout, plan_layout
from verl_slurm.save.ranks.tensors import Tensors
from verl_slurm.save.writer.arena import Arena
from verl_slurm.save.writer.handle import SaverDied, SaverProcess
from verl_slurm.save.writer.protocol import Write, Written


class Staging:
    """One rank's arena and saver. Collective; made once per rank, on the main thread: the saver ends with it.

    Raises:
        RanksFailed: a node has no memory for another copy of its ranks' state; or as `plan_layout`.
    """

    def __init__(
        self,
        domains: Mapping[str, Tensors],
        ranks: Collective,
        *,
        encryption: EncryptionConfig | None = None,
    ) -> None:
        self._ranks, self._encryption = ranks, encryption
        self._copied = threading.Event()
        self._copied.set()
        self._open(plan_layout(domains, ranks))

    def lay_out(self, domains: Mapping[str, Tensors]) -> None:
        """Takes other tensors from the next save on. Collective, on the main thread; no save may be under way.

        RanksFailed: as the constructor; nothing can be saved then until another call succeeds.
        """
        layout = plan_layout(domains, self._ranks)
        # Padding between tensors is zero in a new arena alone, so another layout takes a new one.
        moved = (layout.indexes, layout.files) != (self.layout.indexes, self.layout.files)
        # Agreed on: a saver may have died on one rank, and opening is collective.
        if self._ranks.max([int(moved or not self._is_open or self._saver_died)]) == [0]:
            self._take(layout)
            return
        self.close()
        self._open(layout)

    def _open(self, layout: Layout) -> None:
        self.layout = layout
        self._is_open = self._saver_died = self._saver_is_ready = False
        # Before the arena is made: a rank that runs out of memory later would be killed in the middle of training.
        self._ranks.together(
            "making room for checkpoints", lambda: _require_memory(layout.arena_bytes, _ranks_here())
        )
        self._arena = Arena(layout.arena_bytes)
        self._take(layout)
        self.pinned = False
        """Whether the GPU copies straight into the arena; known once it is warm."""
        self._saver = SaverProcess(self._arena, encryption=self._encryption)
        # One thread, so that the arena is warm before its first use and one save follows the other. It begins now,
        # beside whatever is loaded after the models: a run may be preempted before its first periodic save.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        self._warm = self._thread.submit(self._warm_up)
        self._is_open = True

    def _take(self, layout: Layout) -> None:
        self.layout = layout
        whole = torch.frombuffer(self._arena.view, dtype=torch.uint8)
        self._live = [slot.tensor for slot in layout.slots]
        self._copies = [_view(whole, slot.at, slot.tensor) for slot in layout.slots]
        devices = list(dict.fromkeys(t.device for t in self._live if t.device.type == "cuda"))
        self._device, self._further_devices = next(iter(devices), None), devices[1:]

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, beside the state itself."""
        return self._arena.size

    def wait_until_warm(self) -> None:
        """Waits until the arena is faulted in and, on a GPU, pinned. The first save waits by itself."""
        self._warm.result()

    def begin(
        self, request: "Future[Write]", on_done: Callable[[Written], None] = lambda _: None
    ) -> "Future[None]":
        """Saves the tensors as they are now. The save before must be done.

        Args:
            request: for the writer process, of some or all of `layout.files`; all tensors are copied before
                it.
            on_done: called with the answer for each directory, as soon as there is one, from the staging
                thread.

        Returns:
            Done when all directories are answered for. It raises the exception of `request`, and SaverDied.
        """
        self._copied = copied = threading.Event()
        # Of a loop that has tensors on several: an event waits for its own device alone.
        for device in self._further_devices:
            torch.cuda.current_stream(device).synchronize()
        # On the caller's thread: streams are a thread's own, and the event marks what training had queued by now.
        ready = torch.cuda.current_stream(self._device).record_event() if self._device is not None else None

        def work() -> None:
            try:
                try:
                    self._copy(ready)
                finally:
                    # After an error, too: training waits for it in `fence`, and the future tells the failure.
                    copied.set()
                self._wait_for_saver()
                self._saver.write(request.result(), on_done)
            except SaverDied:
                self._saver_died = True
                raise

        return self._thread.submit(work)

    def fence(self) -> float:
        """Wait until the tensors may be changed in place; the seconds it took."""
        if self._copied.is_set():
            return 0.0
        started = time.perf_counter()
        self._copied.wait()
        return time.perf_counter() - started

    def close(self) -> None:
        """End the saver; what is being written is finished first. May be called twice."""
        if not self._is_open:
            return
        self._is_open = False
        # The thread first: it talks to the saver until its last answer.
        self._thread.shutdown()
        self._saver.close()
        if self.pinned:
            # Before the memory goes: the driver would keep its pages, and refuse the next arena at this address.
            _unpin(self._arena, self._device)
        # They are views of the arena, which cannot be unmapped while one exists.
        self._copies.clear()
        self._live.clear()
        self._arena.close()

    def _warm_up(self) -> None:
        # The saver does the same meanwhile: whichever comes to a page first makes it, the other one maps it.
        self._arena.fault_in()
        if self._device is not None:
            # Pinned pages take a GPU's copy directly, beside the training. Others go through a small buffer of the
            # driver, which holds up the thread that asked: slower, and still right, so saving goes on if the driver
            # refuses.
            self.pinned = _pin(self._arena, self._device)

    def _wait_for_saver(self) -> None:
        # Not before the copy: training waits for that one alone.
        if self._saver_is_ready:
            return
        try:
            self._saver.wait_ready()
        except Exception as error:
            raise SaverDied(f"the saver never came up: {error}") from error
        self._saver_is_ready = True

    def _copy(self, ready: "torch.cuda.Event | None") -> None:
        try:
            self._warm.result()
        except Exception as error:
            raise SaverDied(f"the arena could not be made ready: {error}") from error
        if not self._live:
            return  # a rank that holds replicas only: other ranks write them
        with torch.no_grad():
            if ready is None:
                torch._foreach_copy_(self._copies, self._live)
                return
            # Beside training, on a stream of its own, after all that was queued when the save began.
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                torch._foreach_copy_(self._copies, self._live, non_blocking=True)
            # Here and not on the main thread: `fence` waits for an event of Python, not for the GPU.
            stream.synchronize()
            for device in self._further_devices:
                torch.cuda.synchronize(device)


def _view(whole: Tensor, at: int, like: Tensor) -> Tensor:
    flat = whole[at : at + like.numel() * like.element_size()]
    return flat.view(like.dtype).view(like.shape)


def _ranks_here() -> int:
    """Ranks of this node, by torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _require_memory(num_bytes: int, ranks: int) -> None:
    # For all ranks of this node: each asks before any has touched a page.
    free = available_memory()
    if num_bytes * ranks > free:
        raise ConfigError(
            "no memory for a second copy of this rank's state, which saving needs",
            where="checkpoint",
            found=f"{free} bytes free",
            expected=f"{num_bytes} bytes for each of {ranks} ranks",
            remedy="ask for more memory (slurm.mem_mb_per_node), or for more ranks",
        )


def _pin(arena: Arena, device: torch.device | None) -> bool:
    """Lock the arena's pages, which takes a moment for each GB; whether the driver did it."""
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(_address(arena), arena.size, 0))  # type: ignore[no-untyped-call]
        if not code:
            return True
        with suppress(RuntimeError):
            # The runtime hands its last error to whoever asks next, any kernel of this thread: it is asked now.
            torch.zeros(1, device=device)
    sys.stderr.write(
        f"saving copies more slowly: {arena.size} bytes cannot be pinned (CUDA error {code}); see ulimit -l\n"
    )
    return False


def _unpin(arena: Arena, device: torch.device | None) -> None:
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostUnregister(_address(arena)))  # type: ignore[no-untyped-call]
    if code:
        sys.stderr.write(f"the staging arena stays pinned (CUDA error {code})\n")


def _address(arena: Arena) -> int:
    return torch.frombuffer(arena.view, dtype=torch.uint8).data_ptr()
