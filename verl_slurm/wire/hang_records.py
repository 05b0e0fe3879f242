"""What processes write down when they hang: the stacks of all their threads, and torch's Flight Recorder. No torch.

Each file `*.pipe` in the control directory has a reader in a rank: the trainer's thread (`flight_RANK.pipe`), or
NCCL's (`nccl_RANK.pipe`, made by torch). A byte makes it write. Names: torch 2.9 and newer (`FlightRecorder.hpp`,
`ProcessGroupNCCL.hpp`).
"""

import faulthandler
import os
from contextlib import suppress
from pathlib import Path

from verl_slurm.base.files import open_log
from verl_slurm.wire.environment import LOG_VARIABLE, STACKS_SIGNAL

DUMP_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"
"""The beginning of the files' names; torch appends the rank."""


def flight_environment(prefix: Path, control: Path, records: int) -> dict[str, str]:
    """Returns the variables that make torch keep its last `records` collectives; 0: torch's own defaults."""
    if not records:
        return {}
    return {
        "TORCH_FR_BUFFER_SIZE": str(records),
        DUMP_VARIABLE: str(prefix),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(control / "nccl_"),
    }


def pipe_of(control: Path, rank: int) -> Path:
    """Returns the pipe by which a rank's own thread is asked."""
    return control / f"flight_{rank}.pipe"


def request_flights(control: Path) -> int:
    """Asks every rank of this node; never waits. Returns how many listen."""
    asked = 0
    for pipe in control.glob("*.pipe"):
        with suppress(OSError):  # without a reader: its rank is gone
            fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                asked += os.write(fd, b"1")
            finally:
                os.close(fd)
    return asked


def answer_with_stacks() -> None:
    """Makes STACKS_SIGNAL write the stacks to the log that the agent names, else to stderr."""
    # stderr is that log, but for what Ray starts.
    file = 2
    if log := os.environ.get(LOG_VARIABLE):
        # Ray keeps the output of its processes in files of its own, which end with the job.
        with suppress(OSError):
            file = open_log(Path(log))
    # In C, so that a process answers that hangs with the interpreter's lock held. Children of a fork answer,
    # too.
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
