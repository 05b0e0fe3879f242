"""Which models a run trains: decided by its algorithm, asked by all that count, save or look for them. Pure."""

from typing import Literal

from verl_slurm.config.schema import TrainConfig

__all__ = ["ROLES", "Role", "trained_roles"]

Role = Literal["actor", "critic"]
ROLES: tuple[Role, ...] = ("actor", "critic")
"""All there are, in the order in which they are saved and updated."""


def trained_roles(train: TrainConfig) -> tuple[Role, ...]:
    """PPO's baseline is a model of its own; GRPO's is the mean of a prompt's other responses.

    Called by: config.checks, submit.room, trainer.setup, trainer.resuming, trainer.schedule.
    """
    return ROLES if train.algorithm == "ppo" else ROLES[:1]
