"""Decides from the configuration what a run trains, on which data, and which numbers it yields. Pure.

The trainer makes the numbers and imports torch, so their names are repeated here; tests compare them with real rows.
"""

from pathlib import Path
from typing import Literal

from verl_slurm.config.schema import DataConfig, RunConfig, TrainConfig

Role = Literal["actor", "critic"]
ROLES: tuple[Role, ...] = ("actor", "critic")
"""All roles, in the order in which they are saved and updated."""


def trained_roles(train: TrainConfig) -> tuple[Role, ...]:
    """Returns the roles that train."""
    # GRPO's baseline is no model, but the mean of a prompt's other responses.
    return ROLES if train.algorithm == "ppo" else ROLES[:1]


def data_root(config: RunConfig) -> Path | None:
    """Returns the tree whose fingerprint tells whether the data is that of the first start. None: not declared."""
    # A guest's own program may read its data anywhere; a root that was named is fingerprinted all the same.
    if config.trainer.is_guest and config.data.root == DataConfig().root:
        return None
    return Path(config.data.root)


EVAL_PREFIX = "eval/"
"""Prefix of the names of an evaluation's numbers."""

_STEP = (
    *("reward", "reward_std", "equal_rewards", "kl", "kl_coef", "response_tokens", "sampler_gap"),
    *("policy_loss", "entropy", "policy_kl", "policy_clip", "actor_grad_norm", "learning_rate"),
)
_CRITIC = ("value_loss", "value_clip", "critic_grad_norm", "critic_learning_rate", "explained_variance")
_EVAL = ("reward", "reward_std", "response_tokens", "finished", "prompts")


def step_metrics(config: RunConfig) -> tuple[str, ...]:
    """Lists the numbers of every step of this run, without `step`, `reward_number` and times."""
    critic = _CRITIC if "critic" in trained_roles(config.train) else ()
    # Checkpoints store no times.
    return (*_STEP, *critic, *(("kl_loss",) if config.train.kl_in == "loss" else ()))


def eval_metrics() -> tuple[str, ...]:
    """Lists the further numbers of a step that was evaluated."""
    return tuple(EVAL_PREFIX + name for name in _EVAL)
