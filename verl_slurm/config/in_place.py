"""Checks that a run lies where it was made. A copy has the original's run id and would act on the original's files and
jobs."""

from pathlib import Path

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.schema import RunConfig

__all__ = ["require_in_place"]


def require_in_place(directory: Path, config: RunConfig, verb: str) -> None:
    """Refuses a run that lies elsewhere than its run.yaml says.

    Args:
        directory: of the run.
        config: its run.yaml, in which `run_dir` is absolute.
        verb: the command, for the remedy: `submit`, `offload`.

    Raises:
        ConfigError: a copy, or a run that was moved.
    """
    made_as = Path(config.run_dir)
    if made_as.resolve() != directory.resolve():
        raise ConfigError(
            "a copy, or a run that was moved",
            where=directory,
            found=f"this run was made as {made_as} and lies in {directory.resolve()}",
            remedy=f"{verb} {made_as}, move this one there, or start a new run from {directory / 'run.yaml'} "
            "with another name= and run_dir=",
        )
