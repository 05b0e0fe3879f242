"""Checks the needs of a guest's loop (`config.guest`) before anything is queued."""

from pathlib import Path

from verl_slurm.base.errors import ConfigError, DataError, NotFound
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import load_resolved
from verl_slurm.config.roles import data_root
from verl_slurm.config.schema import RunConfig

__all__ = ["check_guest", "refuse_guests"]


def check_guest(config: RunConfig) -> list[str]:
    """Checks that the program and its data exist; returns the items found good.

    Args:
        config: paths absolute.

    Raises:
        NotFound: the program is not there.
        DataError: `data.root` is not.
    """
    checked = []
    program = config.trainer.command[:1]
    if program and program[0].endswith(".py"):
        if not Path(program[0]).is_file():
            raise NotFound(
                "no such program",
                where=program[0],
                expected="a Python file that the nodes see, too",
                remedy="set trainer.command, or submit from where its path begins",
            )
        checked.append("program")
    root = data_root(config)
    if root is not None:
        if not root.is_dir():
            found = "a file" if root.exists() else "nothing"
            raise DataError("no such data directory", where=root, found=found, remedy="set data.root")
        checked.append("data")
    return checked


def refuse_guests(run: RunPaths) -> None:
    """Refuses an operation that our own trainer alone supports while it runs.

    Raises:
        ConfigError: the run's loop is a guest's.
    """
    trainer = load_resolved(run.run_yaml).trainer
    if trainer.is_guest:
        raise ConfigError(
            "the reward is the program's own",
            where=run.run_yaml,
            found=f"trainer.backend: {trainer.backend}",
            expected="trainer.backend: native",
            remedy="change the program, and submit the run again",
        )
