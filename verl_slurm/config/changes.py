"""Decides what may change about a run while it goes on: its keys, its number of ranks, its place. Pure."""

import re
from pathlib import Path

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.one_line import shell_word
from verl_slurm.config.elastic import OF_A_STEP, from_weights, require_same_step
from verl_slurm.config.load import differences, restoring
from verl_slurm.config.schema import RunConfig

# These may differ between the submissions of one run: they do not affect what is computed. The code itself is compared
# by its content (`submit/checks/code_trees.py`).
_FREE = re.compile(
    r"(slurm|daemon|observability|checkpoint|env|env_from_files|health|hooks|code)\.|train\.eval_|group$"
    r"|rollout\.(keep_samples|max_logprob_gap|gpu_memory_utilization)$"
    # The length of verl's training, its output, and how often it saves and validates.
    r"|verl\.trainer\.(total_|save_freq|test_freq|logger|project_name|experiment_name|val_)"
    # Where a service runs and for how long it is waited for. What it computes is its command and environment.
    r"|services\.[^.]+\.(nodes|cpus|gpus|port|probe|start_timeout_s|restarts|needed|slurm|env_from_files)\b"
)
_LENGTH = "train.steps"


def may_change(key: str) -> bool:
    """Returns whether `key` may differ between two submissions of one run."""
    return bool(_FREE.match(key))


def change_rule(key: str) -> str:
    """Says whether `key` may differ between two submissions of a run that has begun, in words after "may change:"."""
    # A map, such as `env`, is compared entry by entry.
    if may_change(key) or may_change(f"{key}.x"):
        return "yes"
    if key in LAYOUT_KEYS:
        return "together with the number of ranks, if a step stays the same"
    return "to the steps that are done, or more" if key == _LENGTH else "no"


def refuse_changes(
    old: RunConfig, new: RunConfig, run_dir: Path, *, begun: bool = True, steps_done: int = 0
) -> list[str]:
    """Refuses a submitted config that changes what an existing run computes; returns the changed keys.

    Args:
        begun: the run has something to lose; otherwise every key may change.
        steps_done: `train.steps` may change to this number or more.

    Raises:
        ConfigError: a key changed that decides what is computed; the error lists all of them.
    """
    changes = differences(old, new)
    # Nothing has been computed yet, so nothing can be mixed.
    if not begun:
        return [key for key, _, _ in changes]
    # Sizes per device change with the number of ranks; whether a step stays the same is asked of their products.
    resharded = old.distributed.axes != new.distributed.axes
    if resharded and not new.trainer.is_guest:
        require_same_step(old, new, where=run_dir / "run.yaml")
    fixed = [
        f"{key}: {before!r} -> {after!r}"
        for key, before, after in changes
        if not may_change(key)
        and not (key in LAYOUT_KEYS and (resharded or key == "distributed.nodes"))
        # Never below what is done: the run would be over with weights of steps that its configuration does not have.
        and not (key == _LENGTH and _may_stop_at(after, steps_done))
    ]
    if fixed:
        # A guest's program has its own length.
        steps = "" if new.trainer.is_guest else f", train.steps to {steps_done} or more"
        raise ConfigError(
            "the run exists with another configuration",
            where=run_dir / "run.yaml",
            found="; ".join(fixed),
            expected="the same values (only slurm, daemon, observability, checkpoint, env, code, health, hooks, group, "
            f"train.eval_* and the shape of the ranks may change{steps})",
            remedy="take the changes back; or begin a new run with them (name=NEW run_dir=NEW), "
            + (
                from_weights(run_dir)
                if not new.trainer.is_guest and any(key in OF_A_STEP for key, _, _ in changes)
                else f"with {shell_word(f'checkpoint.resume_from={run_dir}/checkpoints/NAME')} "
                f"(`verl-slurm list {shell_word(run_dir)}` lists the names; one of a step's end)"
            ),
        )
    return [key for key, _, _ in changes]


def _may_stop_at(steps: object, steps_done: int) -> bool:
    return isinstance(steps, int) and steps >= steps_done


LAYOUT_KEYS = frozenset(
    (
        *("distributed.dp_size", "distributed.tp_size", "distributed.pp_size", "distributed.nodes"),
        *(f"train.{size}batch_size_per_device" for size in ("", "mini_", "micro_")),
    )
)
"""Keys that may change together with the number of ranks."""


def require_in_place(directory: Path, config: RunConfig, verb: str) -> None:
    """Raises ConfigError if a run lies elsewhere than its run.yaml (`config`) says: a copy, or one that was moved."""
    made_as = Path(config.run_dir)
    if config.run_dir == RunConfig().run_dir:
        raise ConfigError(
            "the run's configuration is damaged",
            where=directory / "run.yaml",
            found="no run_dir",
            expected="the one that `submit` wrote",
            remedy=restoring(directory / "run.yaml"),
        )
    # Resolved: the same run by another link is in its place.
    # A copy has the original's run id and would act on the original's files and jobs.
    if made_as.resolve() != directory.resolve():
        there = f"{verb} {made_as}, " if made_as.exists() else ""
        raise ConfigError(
            "a copy, or a run that was moved",
            where=directory,
            found=f"this run was made as {made_as} and lies in {directory.resolve()}",
            remedy=f"{there}move this one back there, or go on in a new run: "
            f"verl-slurm submit {shell_word(directory / 'run.yaml')} name=NEW run_dir=NEW "
            f"{shell_word(f'checkpoint.resume_from={directory}/checkpoints/NAME')} "
            f"(`verl-slurm list {shell_word(directory)}` lists the names)",
        )
