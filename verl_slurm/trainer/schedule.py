"""The learning rate: a function of whole steps done, so it has no state to lose.

`scheduler.json` in a checkpoint records what it gave, and a resume refuses when it would give something else.
"""

import math

from verl_slurm.config.schema import TrainConfig

__all__ = ["learning_rate", "schedule_record"]


def learning_rate(base: float, config: TrainConfig, step: int) -> float:
    """The rate for the updates of the step that follows `step` whole ones.

    Linear warm-up from base / warmup_steps to base, then constant, or half a cosine that ends at 0 behind
    the last step (Loshchilov & Hutter 2016, arXiv:1608.03983, without restarts).
    """
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return base
    length = max(config.steps - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / length, 1.0)
    return base * 0.5 * (1.0 + math.cos(math.pi * done))


def schedule_record(config: TrainConfig, step: int) -> dict[str, dict[str, float | int | str]]:
    """What `scheduler.json` says of each optimizer after `step` whole steps."""
    return {
        role: {
            "schedule": config.lr_schedule,
            "warmup_steps": config.warmup_steps,
            "base_lr": base,
            "step": step,
            "lr": learning_rate(base, config, step),
        }
        for role, base in (("actor", config.actor_lr), ("critic", config.critic_lr))
    }
