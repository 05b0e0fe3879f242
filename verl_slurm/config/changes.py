"""Decides which keys of a run's configuration may change while the run goes on. Pure. `submit` and the lead use it."""

import re
from pathlib import Path

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.layout import LAYOUT_KEYS, require_same_step
from verl_slurm.config.load import differences
from verl_slurm.config.schema import RunConfig

__all__ = ["may_change", "refuse_changes"]

# These may differ between the submissions of one run: they do not affect what is computed.
_FREE_SECTIONS = ("slurm.", "daemon.", "observability.", "checkpoint.", "train.eval_")
_FREE_KEYS = {"rollout.keep_samples", "rollout.max_logprob_gap", "rollout.gpu_memory_utilization"}
# The length of verl's training, its output, and how often it saves and validates.
_FREE_OF_VERL = re.compile(
    r"verl\.trainer\.(total_|save_freq|test_freq|logger|project_name|experiment_name|val_)"
)


def may_change(key: str) -> bool:
    """Returns whether `key` may differ between two submissions of one run."""
    return key.startswith(_FREE_SECTIONS) or key in _FREE_KEYS or _FREE_OF_VERL.match(key) is not None


def refuse_changes(
    old: RunConfig, new: RunConfig, run_dir: Path, *, begun: bool = True, steps_done: int = 0
) -> list[str]:
    """Refuses a submitted config that changes what an existing run computes.

    Args:
        old: the config of the run.
        new: the config submitted now.
        run_dir: for the error.
        begun: the run has something to lose; otherwise every key may change.
        steps_done: `train.steps` may change to this number or more.

    Returns:
        The changed keys, all of which may change.

    Raises:
        ConfigError: a key changed that decides what is computed; the error lists all of them.
    """
    changes = differences(old, new)
    if not begun:
        return [key for key, _, _ in changes]
    resharded = old.distributed.axes != new.distributed.axes
    if resharded and not new.trainer.is_guest:
        require_same_step(old, new, where=run_dir / "run.yaml")
    fixed = [
        f"{key}: {before!r} -> {after!r}"
        for key, before, after in changes
        if not may_change(key)
        and not (key in LAYOUT_KEYS and (resharded or key == "distributed.nodes"))
        and not (key == "train.steps" and _may_stop_at(after, steps_done))
    ]
    if fixed:
        steps = f", train.steps to {steps_done} or more"
        raise ConfigError(
            "the run exists with another configuration",
            where=run_dir / "run.yaml",
            found="; ".join(fixed),
            expected="the same values (only slurm, daemon, observability, checkpoint and the shape of the ranks may "
            f"change{steps})",
            remedy="choose another name or run_dir for a new run, or take the changes back",
        )
    return [key for key, _, _ in changes]


def _may_stop_at(steps: object, steps_done: int) -> bool:
    return isinstance(steps, int) and steps >= steps_done
