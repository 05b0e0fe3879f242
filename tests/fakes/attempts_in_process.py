"""One attempt of a run in this process: from what there is until it ends, or is killed where a test wants it.

It stands for a rank's process under torchrun, whose start costs seconds. `Killed` is an exception, so what is being
written is written to its end: tests of a rank that dies in a save use `faulty_rank.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.builders import run_config
from tests.processes import free_port
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.config import load
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.loop import Loop
from verl_slurm.trainer.place import Place, process_group
from verl_slurm.trainer.setup import build_loop
from verl_slurm.wire.client import RankLine


class Killed(BaseException):
    """Stands for the end of the process; nothing of ours catches it."""


@contextmanager
def one_rank() -> Iterator[tuple[torch.device, Collective]]:
    """This process as the one rank of a run; the settings of its torch come back at the end."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        words = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (words | {"MASTER_PORT": str(free_port())}).items():
            patch.setenv(name, value)
        try:
            with process_group(run_config(ranks=1), Place(rank=0, local_rank=0, world_size=1)) as group:
                yield group
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)


def begin(paths: RunPaths, line: RankLine, device: torch.device, ranks: Collective, restart: int = 0) -> Loop:
    """`line` says what the daemon wants, or raises `Killed`."""
    return build_loop(
        load.load_resolved(paths.run_yaml),
        paths,
        attempt=take_attempt(paths, job_id="test", restart=restart).attempt,
        resume=choose_resume(paths, "auto").name or "",
        device=device,
        ranks=ranks,
        line=line,
    )


def live(paths: RunPaths, line: RankLine, device: torch.device, ranks: Collective, restart: int = 0) -> Loop:
    """Runs an attempt to its end or its `Killed`."""
    loop = begin(paths, line, device, ranks, restart)
    try:
        loop.run()
    except Killed:
        loop._settle()  # what is being written goes on without the process that asked for it
        loop._checkpointer.close()
    return loop
