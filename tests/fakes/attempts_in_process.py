"""One attempt of a run in this process: from what there is until it ends, or is killed where a test wants it.

It stands for a rank's process under torchrun, whose start costs seconds. `Killed` is an exception, so what is being
written is written to its end: tests of a rank that dies in a save use `faulty_rank.py`.
"""

import torch

from verl_slurm.base.fence import take_epoch
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.config import load
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.loop import Loop
from verl_slurm.trainer.setup import build_loop
from verl_slurm.wire.client import RankLine


class Killed(BaseException):
    """Stands for the end of the process; nothing of ours catches it."""


def live(paths: RunPaths, line: RankLine, device: torch.device, ranks: Collective, restart: int = 0) -> Loop:
    """`line` says what the daemon wants, or raises `Killed`."""
    loop = build_loop(
        load.load_resolved(paths.run_yaml),
        paths,
        epoch=take_epoch(paths, job_id="test", restart=restart).epoch,
        resume=choose_resume(paths, "auto").name or "",
        device=device,
        ranks=ranks,
        line=line,
    )
    try:
        loop.run()
    except Killed:
        loop._settle()  # what is being written goes on without the process that asked for it
        loop._checkpointer.close()
    return loop
