"""Decides with which settings verl begins a start of a run: the user's, and those of the start. No torch, no verl."""

from pathlib import Path

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.loop_checkpoint import for_ranks, require_guest
from verl_slurm.config.schema import RunConfig
from verl_slurm.loops.session import Session
from verl_slurm.verl.composing import Composed, checked_settings
from verl_slurm.verl.overrides import OwnSettings
from verl_slurm.verl.releases import installed_verl, require_usable


def require_verl(session: Session) -> None:
    """Requires a verl that can be served; says if its release was never tried.

    Raises:
        ConfigError: there is none, or one that is too old.
    """
    if note := require_usable(installed_verl()):
        session.notice(note, topic="device", loud=True)


def resume_point(config: RunConfig, paths: RunPaths, name: str) -> tuple[Path, int]:
    """Returns the directory that verl resumes from in a verified checkpoint, and its step.

    Raises:
        ConfigError: it is not of this kind of run, or of another number of ranks.
    """
    ranks = config.distributed.world_size
    directory = for_ranks(paths, name, ranks)
    step = require_guest(directory, "verl", world_size=ranks).step
    resume = directory / f"global_step_{step}"
    # PPO's shards lie in `actor/`, those of SFT do not; either trainer would fail on the other's deep inside.
    if (resume / "actor").is_dir() != (config.trainer.entry == "ppo"):
        raise ConfigError(
            "the checkpoint is of another of verl's trainers",
            where=resume,
            expected=f"one of trainer.entry={config.trainer.entry}",
            remedy="go on with the trainer.entry that wrote it",
        )
    return resume, step


def start_settings(config: RunConfig, paths: RunPaths, attempt: int, resume: Path | None) -> Composed:
    """Composes verl's settings for an attempt.

    Args:
        resume: from `resume_point`; None: from the start.

    Raises:
        ConfigError: verl does not take a setting, or a run cannot.
    """
    own = OwnSettings(
        nodes=config.distributed.nodes,
        ranks_per_node=config.distributed.ranks_per_node,
        save_dir=paths.work(attempt),
        resume=resume,
        every_steps=config.checkpoint.every_steps,
        name=config.name,
    )
    return checked_settings(config.trainer.entry, config.verl, own, recipe=bool(config.trainer.command))
