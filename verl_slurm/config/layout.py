"""Adapts a run to another number of ranks: the values that must stay, and those that follow from it. Pure.

A run may continue with more or fewer ranks while a step stays the same: the same prompts, cut into the same updates.
Sizes "per device" then change with the number of ranks.
"""

import math

import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.one_line import counted
from verl_slurm.config.schema import RunConfig

__all__ = ["LAYOUT_KEYS", "keep_step", "require_same_step"]

LAYOUT_KEYS = frozenset(
    {
        "distributed.dp_size",
        "distributed.tp_size",
        "distributed.pp_size",
        "distributed.nodes",
        "train.batch_size_per_device",
        "train.mini_batch_size_per_device",
        "train.micro_batch_size_per_device",
    }
)
"""Keys that may change together with the number of ranks."""

_SCALED = ("batch_size_per_device", "mini_batch_size_per_device")
_KEPT = (
    ("rollout", "micro_batch_size_per_device"),
    ("rollout", "samples_per_prompt"),
    ("train", "ppo_epochs"),
)


def keep_step(old: RunConfig, new: RunConfig) -> RunConfig:
    """Returns `new` with its sizes per device scaled to its number of ranks, unless the user changed them.

    A size that does not divide stays as it is; `require_same_step` reports it.
    """
    former, now = old.distributed.dp_size, new.distributed.dp_size
    if former == now:
        return new
    train = new.train
    for key in _SCALED:
        total = getattr(old.train, key) * former
        if getattr(train, key) == getattr(old.train, key) and total % now == 0:
            train = msgspec.structs.replace(train, **{key: total // now})
    if train.micro_batch_size_per_device == old.train.micro_batch_size_per_device:
        # The largest that divides a mini-batch, and never larger than the one that fitted into memory.
        micro = math.gcd(train.micro_batch_size_per_device, train.mini_batch_size_per_device)
        train = msgspec.structs.replace(train, micro_batch_size_per_device=micro)
    return msgspec.structs.replace(new, train=train)


def require_same_step(old: RunConfig, new: RunConfig, *, where: object) -> None:
    """Refuses a change of the number of ranks that also changes what a step is.

    Args:
        old: of the run so far, or of a checkpoint.
        new: of this start.

    Raises:
        ConfigError: the step would change; the error gives values that fit.
    """
    former, now = old.distributed.dp_size, new.distributed.dp_size
    wrong = []
    for key in _SCALED:
        total = getattr(old.train, key) * former
        if getattr(new.train, key) * now != total:
            wrong.append((f"train.{key}", getattr(new.train, key), f"{total / now:g}"))
    for section, key in _KEPT:
        before, given = (getattr(getattr(config, section), key) for config in (old, new))
        if before != given:
            wrong.append((f"{section}.{key}", given, str(before)))
    if not wrong and new.train.batch_size_per_device % new.rollout.micro_batch_size_per_device:
        wrong.append(
            (
                "train.batch_size_per_device",
                new.train.batch_size_per_device,
                f"a multiple of {new.rollout.micro_batch_size_per_device}",
            )
        )
    if wrong:
        raise ConfigError(
            f"the run has {counted(former, 'rank')} so far, and with {now} a step would be another one",
            where=where,
            found=", ".join(f"{key}={given}" for key, given, _ in wrong),
            expected=", ".join(f"{key}={value}" for key, _, value in wrong),
            remedy="choose a number of ranks that divides the batch into whole micro-batches",
        )
