"""Declares the sections `trainer` and `verl`: the training loop that runs. Follows the manner of `schema.py`.

A *guest* is a loop outside this project: one of verl's own trainers, or a program of the user's. The daemon serves it
like ours; its saves become ordinary checkpoints of the run.
"""

from typing import Annotated, Any, Literal

import msgspec

__all__ = ["GuestConfig", "VerlSection", "flattened"]

VerlSection = dict[str, Any]
"""verl's own Hydra keys, passed on unchanged. In a file they may be nested or dotted (`trainer.total_epochs: 2`); here
they are dotted. As in Hydra, `+` before a key adds one that verl's own configuration lacks."""


def flattened(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns `section` with its nested maps as dotted keys; later ones win. Lists and empty maps stay as they are."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        whole = key
        if prefix:
            bare, path = key.lstrip("+~"), prefix.lstrip("+~")
            mark = key.removesuffix(bare) or prefix.removesuffix(path)
            whole = f"{mark}{path}.{bare}"
        inner = flattened(value, whole) if isinstance(value, dict) and value else {whole: value}
        for name in inner:
            flat.pop(name, None)  # keep the order: a later key is also later in the words for verl
        flat |= inner
    return flat


class GuestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Selects the training loop."""

    backend: Literal["native", "verl", "command"] = "native"
    """`native`: our trainer, as `model`, `data`, `rollout` and `train` describe it. `verl`: the package `verl`,
    unpatched, as the section `verl` describes it. `command`: any program that calls `verl_slurm.run()`
    (docs/guests.md)."""
    entry: Literal["ppo", "sft"] = "ppo"
    """verl: `ppo` is `verl.trainer.main_ppo` on Ray (PPO, GRPO and the like), `sft` its SFT trainer."""
    command: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    """command: a Python file, or `-m` and a module, and its arguments, e.g. [train.py, --lr, "1e-4"]. It is started
    as torchrun would, on `distributed.dp_size` ranks over all nodes. A relative file is resolved from the directory of
    the YAML."""

    @property
    def is_guest(self) -> bool:
        return self.backend != "native"

    @property
    def on_ray(self) -> bool:
        """Returns whether one process on the first node leads and Ray, instead of the agents, starts the others."""
        return self.backend == "verl" and self.entry == "ppo"
