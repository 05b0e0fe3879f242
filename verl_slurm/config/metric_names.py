"""Names the numbers of a step's row, as far as a configuration decides them. Pure.

The trainer makes these numbers and imports torch, so the names are repeated here. Tests compare them with real rows
(tests/trainer/test_evaluating.py, test_combinations.py).
"""

from verl_slurm.config.roles import trained_roles
from verl_slurm.config.schema import RunConfig

__all__ = ["EVAL_PREFIX", "eval_metrics", "step_metrics"]

EVAL_PREFIX = "eval/"
"""Prefix of the names of an evaluation's numbers."""

_STEP = (
    *("reward", "reward_std", "kl", "kl_coef", "response_tokens", "sampler_gap"),
    *("policy_loss", "entropy", "policy_kl", "policy_clip", "actor_grad_norm", "learning_rate"),
)
_CRITIC = ("value_loss", "value_clip", "critic_grad_norm", "critic_learning_rate", "explained_variance")
_EVAL = ("reward", "reward_std", "response_tokens", "finished", "prompts")


def step_metrics(config: RunConfig) -> tuple[str, ...]:
    """Lists the numbers of every step of this run, without `step`, `reward_number` and times (checkpoints store no
    times)."""
    critic = _CRITIC if "critic" in trained_roles(config.train) else ()
    return (*_STEP, *critic, *(("kl_loss",) if config.train.kl_in == "loss" else ()))


def eval_metrics() -> tuple[str, ...]:
    """Lists the further numbers of a step that was evaluated."""
    return tuple(EVAL_PREFIX + name for name in _EVAL)
