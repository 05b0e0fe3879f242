"""The numbers that a step's row has, by name, as far as a configuration decides them. Pure.

The trainer makes them and imports torch; so the names are repeated here, and a test holds them to real rows
(tests/trainer/test_evaluating.py, test_combinations.py).
"""

from verl_slurm.config.roles import trained_roles
from verl_slurm.config.schema import RunConfig

__all__ = ["EVAL_PREFIX", "eval_metrics", "step_metrics"]

EVAL_PREFIX = "eval/"
"""What the names of an evaluation's numbers begin with."""

_STEP = (
    *("reward", "reward_std", "kl", "kl_coef", "response_tokens", "sampler_gap"),
    *("policy_loss", "entropy", "policy_kl", "policy_clip", "actor_grad_norm", "learning_rate"),
)
_CRITIC = ("value_loss", "value_clip", "critic_grad_norm", "critic_learning_rate", "explained_variance")
_EVAL = ("reward", "reward_std", "response_tokens", "finished", "prompts")


def step_metrics(config: RunConfig) -> tuple[str, ...]:
    """What every step of this run has, without `step` and `reward_number`. No times: no checkpoint has those."""
    critic = _CRITIC if "critic" in trained_roles(config.train) else ()
    return (*_STEP, *critic, *(("kl_loss",) if config.train.kl_in == "loss" else ()))


def eval_metrics() -> tuple[str, ...]:
    """What a step has that was evaluated, besides."""
    return tuple(EVAL_PREFIX + name for name in _EVAL)
