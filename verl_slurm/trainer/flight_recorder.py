"""Writes down, when a run hangs, which collectives this rank has begun and ended: torch's Flight Recorder, as JSON.

The agent asks by a byte in a pipe of its control directory. A thread answers, since the main thread waits in a
collective, and torch has released the interpreter there. Where the interpreter is held, NCCL's own thread still
answers the same request (TORCH_NCCL_DEBUG_INFO_PIPE_FILE), with a pickle, which nothing here ever reads.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path

import torch

from verl_slurm.base.files import write_file
from verl_slurm.wire.hang_records import DUMP_VARIABLE, pipe_of

_DUMPS = {"_dump_fr_trace_json": "gloo", "_dump_nccl_trace_json": "nccl"}
"""Torch's functions, by what a build of torch has (2.13), and the names of their files."""
_MOST_BYTES = 64 << 20


def write_on_request(control: Path, rank: int) -> None:
    """Starts the thread; without a pipe or a place for the files it does nothing.

    Args:
        control: the agent's directory on this node, 0700 and new for each start.
    """
    prefix = os.environ.get(DUMP_VARIABLE)
    if not prefix:
        return
    with suppress(OSError):
        pipe = pipe_of(control, rank)
        os.mkfifo(pipe, 0o600)
        # For both directions: with a writer of its own, a read waits and never meets an end.
        fd = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        threading.Thread(target=_serve, args=(fd, prefix, rank), name="flight", daemon=True).start()


def _serve(fd: int, prefix: str, rank: int) -> None:
    while os.read(fd, 1):
        for function, backend in _DUMPS.items():
            dump = getattr(torch._C._distributed_c10d, function, None)
            # It informs; nothing that fails here may reach the training.
            with suppress(Exception):
                data = bytes(dump()) if dump is not None else b""
                if 0 < len(data) <= _MOST_BYTES:
                    write_file(Path(f"{prefix}{rank}.{backend}.json"), data, durable=False)
