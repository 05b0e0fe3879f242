"""Decides from the configuration what a run trains and on which data, for all code that counts, saves or finds it.
Pure."""

from pathlib import Path
from typing import Literal

from verl_slurm.config.schema import DataConfig, RunConfig, TrainConfig

__all__ = ["ROLES", "Role", "data_root", "trained_roles"]

Role = Literal["actor", "critic"]
ROLES: tuple[Role, ...] = ("actor", "critic")
"""All roles, in the order in which they are saved and updated."""


def trained_roles(train: TrainConfig) -> tuple[Role, ...]:
    """Returns the roles that train. PPO's baseline is a model; GRPO's is the mean of a prompt's other responses."""
    return ROLES if train.algorithm == "ppo" else ROLES[:1]


def data_root(config: RunConfig) -> Path | None:
    """Returns the tree whose fingerprint tells whether the data is still that of the first start. None: a guest's
    program without a declared data set.
    """
    if config.trainer.is_guest and config.data.root == DataConfig().root:
        return None
    return Path(config.data.root)
