"""What a run trains, and on what: decided by its configuration, asked by all that count, save or look for it. Pure."""

from pathlib import Path
from typing import Literal

from verl_slurm.config.schema import DataConfig, RunConfig, TrainConfig

__all__ = ["ROLES", "Role", "data_root", "trained_roles"]

Role = Literal["actor", "critic"]
ROLES: tuple[Role, ...] = ("actor", "critic")
"""All there are, in the order in which they are saved and updated."""


def trained_roles(train: TrainConfig) -> tuple[Role, ...]:
    """PPO's baseline is a model of its own; GRPO's is the mean of a prompt's other responses."""
    return ROLES if train.algorithm == "ppo" else ROLES[:1]


def data_root(config: RunConfig) -> Path | None:
    """The tree whose fingerprint tells whether the data is still that of the first start. None: a guest's program that
    was not said to have one.
    """
    if config.trainer.is_guest and config.data.root == DataConfig().root:
        return None
    return Path(config.data.root)
