"""The arena's pages told to the GPU's driver, so that it copies into them straight, beside the training.

Without that a copy goes through a small buffer of the driver's, and holds up the thread that asked for it: slower, and
still right. So where the driver refuses (a limit of locked memory, a kernel that cannot), saving goes on.
"""

import sys
from contextlib import suppress

import torch

from verl_slurm.save.writer.arena import Arena

__all__ = ["pin", "unpin"]


def pin(arena: Arena, device: torch.device | None) -> bool:
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


def unpin(arena: Arena, device: torch.device | None) -> None:
    """Undo it, before the memory is unmapped."""
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostUnregister(_address(arena)))  # type: ignore[no-untyped-call]
    if code:
        sys.stderr.write(f"the staging arena stays pinned (CUDA error {code})\n")


def _address(arena: Arena) -> int:
    return torch.frombuffer(arena.view, dtype=torch.uint8).data_ptr()
