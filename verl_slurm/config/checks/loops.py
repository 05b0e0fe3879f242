"""Checks a guest's loop (`GuestConfig`) beyond the types: the keys that it needs, and the keys that it does not read.

A key that no code reads would be silently ignored, so it is refused, and the complaint names the right place. Pure.
"""

from collections.abc import Iterator

import msgspec

from verl_slurm.config.checks import Complaint
from verl_slurm.config.schema import DistributedConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig

_OURS = {
    "model": ModelConfig(),
    "rollout": RolloutConfig(),
    "train": TrainConfig(),
}
_OURS_OF_DATA = ("prompt_key", "answer_key", "max_prompt_tokens", "shuffle", "eval_root", "eval_fraction")
_OURS_OF_CHECKPOINT = (
    "cadence",
    "intervals",
    "keep_best",
    "components",
    "include_optimizer",
    "partial_every_steps",
    "local_dir",
    "encryption",
)
_OURS_OF_DISTRIBUTED = ("tp_size", "pp_size", "mixed_precision", "recompute")


def guest_complaints(config: RunConfig) -> Iterator[Complaint]:
    """Yields every complaint about the guest's loop."""
    trainer = config.trainer
    if trainer.backend != "verl" and config.verl:
        found = f"a section, and trainer.backend={trainer.backend}"
        yield Complaint(
            "verl", found, "trainer.backend: verl, which reads it", "set it, or remove the section"
        )
    if trainer.backend != "verl" and trainer.entry != "ppo":
        yield Complaint("trainer.entry", trainer.entry, "only trainer.backend: verl reads it", "remove it")
    if trainer.backend in ("command", "ray") and not trainer.command:
        yield Complaint(
            "trainer.command", "[]", "what is to run", 'e.g. trainer.command: [train.py, --lr, "1e-4"]'
        )
    if trainer.command and (trainer.backend, trainer.entry) in (("native", "ppo"), ("verl", "sft")):
        found = f"{' '.join(trainer.command)}, and trainer.backend={trainer.backend}"
        reads = "trainer.backend: command, ray, or verl with entry ppo, which read it"
        yield Complaint("trainer.command", found, reads, "set it, or remove it")
    if trainer.is_guest:
        yield from _not_read(config)


def _not_read(config: RunConfig) -> Iterator[Complaint]:
    backend = config.trainer.backend
    where = "under `verl:`, in verl's own words" if backend == "verl" else "in your program"
    # Compared with the defaults: a section that was not written has them.
    for name, default in _OURS.items():
        if getattr(config, name) != default:
            changed = _changed(getattr(config, name), default)
            yield Complaint(
                f"{name}.{changed[0]}",
                f"a value, and trainer.backend={backend}, which does not read `{name}`",
                "only trainer.backend: native reads it",
                f"remove it and say it {where}",
            )
    closed = (
        ("data", config.data, type(config.data)(), _OURS_OF_DATA),
        ("checkpoint", config.checkpoint, type(config.checkpoint)(), _OURS_OF_CHECKPOINT),
        ("distributed", config.distributed, DistributedConfig(), _OURS_OF_DISTRIBUTED),
    )
    for name, section, default, keys in closed:
        # The rest of these sections is read for a guest, too.
        for key in set(_changed(section, default)) & set(keys):
            yield Complaint(
                f"{name}.{key}",
                f"a value, and trainer.backend={backend}, whose checkpoints are the program's own",
                "only trainer.backend: native has that",
                "remove it",
            )


def _changed(section: msgspec.Struct, default: msgspec.Struct) -> list[str]:
    return [name for name in section.__struct_fields__ if getattr(section, name) != getattr(default, name)]
