"""Keeps a step the same on another number of ranks, and finds the numbers of nodes that a run may train on. Pure."""

import math

import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.config.schema import RunConfig

_SCALED = ("batch_size_per_device", "mini_batch_size_per_device")
_KEPT = (
    ("rollout", "micro_batch_size_per_device"),
    ("rollout", "samples_per_prompt"),
    ("train", "ppo_epochs"),
)
OF_A_STEP = frozenset(
    ("train.algorithm", *(f"train.{key}" for key in _SCALED), *(f"{section}.{key}" for section, key in _KEPT))
)
"""Keys with which a checkpoint cannot be gone on from, not even in a new run."""


def from_weights(place: object) -> str:
    """Returns how a new run begins from the weights of a checkpoint, or of a run's newest."""
    export = f"verl-slurm export {shell_word(str(place))} --to hf --out DIR"
    return f"from the weights alone: `{export}`, then model.path=DIR"


def keep_step(old: RunConfig, new: RunConfig) -> RunConfig:
    """Returns `new` with its sizes per device scaled to its number of ranks, unless the user changed them."""
    former, now = old.distributed.dp_size, new.distributed.dp_size
    if former == now:
        return new
    train = new.train
    for key in _SCALED:
        # Over all ranks: this is what must stay.
        total = getattr(old.train, key) * former
        # A size that the user changed is not scaled: it may be meant for the new number of ranks already.
        # One that does not divide stays as it is; `require_same_step` reports it.
        if getattr(train, key) == getattr(old.train, key) and total % now == 0:
            train = msgspec.structs.replace(train, **{key: total // now})
    if train.micro_batch_size_per_device == old.train.micro_batch_size_per_device:
        # The largest that divides a mini-batch, and never larger than the one that fitted into memory.
        micro = math.gcd(train.micro_batch_size_per_device, train.mini_batch_size_per_device)
        train = msgspec.structs.replace(train, micro_batch_size_per_device=micro)
    return msgspec.structs.replace(new, train=train)


def require_same_step(old: RunConfig, new: RunConfig, *, where: object) -> None:
    """Raises ConfigError, with values that fit, if the new number of ranks also changes what a step is."""
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
    # Records of the ledger are counted in generation micro-batches, so a rank has whole ones.
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
            "with these sizes a step would be another one than the checkpoint's"
            if former == now
            else f"the run has {counted(former, 'rank')} so far, and with {now} a step would be another one",
            where=where,
            found=", ".join(f"{key}={given}" for key, given, _ in wrong),
            expected=", ".join(f"{key}={value}" for key, _, value in wrong),
            remedy=f"take them back, or begin a new run {from_weights(where)}"
            if former == now
            else "choose a number of ranks that divides the batch into whole micro-batches",
        )


def on_nodes(config: RunConfig, nodes: int) -> RunConfig:
    """Returns the configuration of a start on so many nodes: as many ranks on each, and the same prompts and
    mini-batches in a step. ConfigError: a step cannot be divided among so many ranks.
    """
    shape = config.distributed
    if nodes == shape.nodes:
        return config
    dp_size, rest = divmod(shape.dp_size * nodes, shape.nodes)
    if rest or not dp_size:
        raise ConfigError(
            "the data-parallel ranks cannot be spread like this",
            where="distributed.nodes",
            found=f"{shape.dp_size} on {shape.nodes} nodes",
            expected=f"a number that {nodes} nodes have their part of",
        )
    now = msgspec.structs.replace(
        config, distributed=msgspec.structs.replace(shape, nodes=nodes, dp_size=dp_size, min_nodes=None)
    )
    # A guest divides its step itself.
    if not config.trainer.is_guest:
        now = keep_step(config, now)
        require_same_step(config, now, where="distributed.min_nodes")
    return now


def on_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """Returns the same for so many ranks, where the run may lose nodes; else `config`. Raises as `on_nodes`."""
    shape = config.distributed
    elastic = shape.min_nodes is not None and ranks % shape.ranks_per_node == 0
    return on_nodes(config, ranks // shape.ranks_per_node) if elastic else config


def allowed_nodes(config: RunConfig) -> tuple[int, ...]:
    """Returns the numbers of nodes that the ranks may have, largest first."""
    most, least = config.distributed.nodes, config.distributed.min_nodes
    return tuple(number for number in range(most, (least or most) - 1, -1) if _fits(config, number))


def _fits(config: RunConfig, nodes: int) -> bool:
    try:
        on_nodes(config, nodes)
    except ConfigError:
        return False
    return True
