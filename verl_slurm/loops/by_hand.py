"""Runs a guest without a daemon: under torchrun or alone, by hand, into a directory of the user's choice. No torch.

Without a daemon there are no save requests, no verification of saves and no restarts. So rank 0 does here what a lead
does at a start: it takes the run's epoch, sweeps the remains of dead processes, and finds the newest checkpoint that
verifies.
"""

import os
from pathlib import Path

import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.fence import take_epoch
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.commit import sweep
from verl_slurm.checkpoint.store.loop_checkpoint import sweep_work
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.config.load import dump
from verl_slurm.config.schema import RunConfig

__all__ = ["Start", "begin"]


class Start(msgspec.Struct, frozen=True):
    """Rank 0's message to all: the run's directory, the attempt, and the checkpoint's name; empty: from the start."""

    root: str
    epoch: int
    resume: str


def begin(run_dir: Path) -> Start:
    """Takes the run at `run_dir`, which need not exist yet, and finds the checkpoint to resume from. Rank 0.

    Raises:
        ConfigError: a daemon's lead lives there.
        Fenced: another process took it at the same moment.
        CheckpointCorrupt, SchemaMismatch: `recover.choose_resume`.
        PermissionRefused: it is another user's.
    """
    paths = RunPaths(run_dir.absolute())
    private_dir(paths.root)
    if paths.lead_address.exists():
        raise ConfigError(
            "a daemon serves this run",
            where=paths.lead_address,
            expected="a directory of its own for a loop that is started by hand",
            remedy=f"verl-slurm status {paths.root}; if its job is dead, remove that file",
        )
    if not paths.run_yaml.exists():
        write_file(paths.run_yaml, dump(RunConfig(name=paths.root.name, run_dir=str(paths.root))))
    mine = take_epoch(paths, job_id=str(os.getpid()), restart=0)
    private_dir(paths.checkpoints)
    sweep(paths)
    sweep_work(paths)
    choice = choose_resume(paths, "auto")
    return Start(root=str(paths.root), epoch=mine.epoch, resume=choice.name or "")
