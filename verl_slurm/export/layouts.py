"""Writes the two layouts of plain `.pt` files. Each file loads with `torch.load(path, weights_only=True)`.

```
single-file              split                            holds
actor_model.pt           policy_model/pytorch_model.bin   the argument of `model.load_state_dict`
critic_model.pt          value_model/pytorch_model.bin    the same
optimizer.pt             optimizer/optim_states.pt        role → state dict of torch.optim.AdamW
scheduler.pt             scheduler/sched_state.pt         role → state dict of torch's LambdaLR
```

An optimizer's part is the argument of `AdamW(model.parameters()).load_state_dict`: `state` by number, and one group.
The group's `params` counts the parameters in the order of `model.parameters()`, and its `param_names` (torch's own key
for it) gives their names. Its `lr` is that of the next update. Moments are always as they were saved; `--dtype` is for
the models.

A scheduler's part is the argument of `LambdaLR.load_state_dict`, and under `record` the schedule in words and numbers.

One file is made at a time, and torch.save needs the whole of it in memory: the largest is the optimizer's.
"""

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from verl_slurm.base.errors import SchemaMismatch
from verl_slurm.config.roles import Role
from verl_slurm.export.skeleton import Skeleton
from verl_slurm.export.source import ExportSource, cast_bytes

FILES: dict[str, dict[str, str]] = {
    "single-file": {
        "actor": "actor_model.pt",
        "critic": "critic_model.pt",
        "optimizer": "optimizer.pt",
        "scheduler": "scheduler.pt",
    },
    "split": {
        "actor": "policy_model/pytorch_model.bin",
        "critic": "value_model/pytorch_model.bin",
        "optimizer": "optimizer/optim_states.pt",
        "scheduler": "scheduler/sched_state.pt",
    },
}
"""Layout → content → path below the export."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """One role's part of scheduler.json, as `trainer.objective.optimizers` writes it."""

    schedule: str
    warmup_steps: int
    base_lr: float
    step: int
    """Whole steps done."""
    lr: float
    """Of the next update."""


def write_layout(
    source: ExportSource,
    layout: str,
    skeletons: dict[Role, Skeleton],
    out: Path,
    *,
    dtype: torch.dtype | None,
    weight_decay: float,
) -> None:
    """Fills the directory `out`, with the models' floating-point weights in `dtype` (None: as saved).

    The optimizers' file is left out if the checkpoint holds no optimizer.

    Raises:
        SchemaMismatch: the optimizer's state or scheduler.json is not laid out as this code knows it.
        OSError: the storage refused.
    """
    files = {what: out / name for what, name in FILES[layout].items()}
    written = {*skeletons, "scheduler"} | ({"optimizer"} if source.has("optimizer") else set())
    for what in written:
        files[what].parent.mkdir(mode=0o700, exist_ok=True)
    # Read before the models are written: what is refused is refused early.
    schedules = _schedules(source, list(skeletons))
    for role, skeleton in skeletons.items():
        state = dict(source.tensors(role, skeleton.shapes, dtype))
        # As in the model's own state dict: one storage under both names, which torch.save writes once.
        state |= {alias: state[first] for alias, first in skeleton.aliases.items()}
        _save(state, files[role])
        # One model is in memory at a time, and none beside the optimizer's state.
        del state
    if "optimizer" in written:
        _save(
            {
                role: adamw_state(source, role, skeleton, lr=schedules[role].lr, weight_decay=weight_decay)
                for role, skeleton in skeletons.items()
            },
            files["optimizer"],
        )
    _save({role: lambda_lr_state(schedules[role]) for role in skeletons}, files["scheduler"])


def _save(value: object, path: Path) -> None:
    try:
        # "x": the directory is ours and new; a name that is taken already is an error in this module.
        with path.open("xb") as file:
            torch.save(value, file)
    except RuntimeError as error:
        # After a failed write torch's writer fails on its own count; the context holds the cause.
        if isinstance(error.__context__, OSError):
            raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from error
        raise


def adamw_state(
    source: ExportSource, role: Role, skeleton: Skeleton, *, lr: float, weight_decay: float
) -> dict[str, Any]:
    """Returns the argument of `AdamW.load_state_dict`. SchemaMismatch: state of something but a parameter."""
    prefix = f"{role}."
    keys: dict[str, list[str]] = {}
    for name in source.entries("optimizer"):
        if name.startswith(prefix):
            # The key is the last part; names of parameters contain dots.
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            keys.setdefault(parameter, []).append(key)
    strange = sorted(keys.keys() - set(skeleton.parameters))
    # Left out silently, its moments would be lost.
    if strange:
        raise _unknown(
            source.reader.directory / "optimizer", f"state of {strange[0]}", f"parameters of the {role}"
        )
    # A frozen parameter has no state, and did not belong to the optimizer.
    order = [name for name in skeleton.parameters if name in keys]
    places = {f"{prefix}{name}.{key}": (index, key) for index, name in enumerate(order) for key in keys[name]}
    state: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(order))}
    for name, tensor in source.tensors("optimizer", places):
        index, key = places[name]
        state[index][key] = tensor
    # torch's own group, so that AdamW's defaults are not repeated here.
    like = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=lr, weight_decay=weight_decay)
    group = like.state_dict()["param_groups"][0]
    group |= {"params": list(range(len(order))), "param_names": order}
    return {"state": state, "param_groups": [group]}


def lambda_lr_state(schedule: Schedule) -> dict[str, Any]:
    """Returns the argument of `torch.optim.lr_scheduler.LambdaLR.load_state_dict`."""
    return {
        "last_epoch": schedule.step,
        # torch's schedulers count one step when they are made.
        "_step_count": schedule.step + 1,
        "base_lrs": [schedule.base_lr],
        "_last_lr": [schedule.lr],
        # What torch writes for a lambda: it saves no function. The schedule stands under `record`.
        "lr_lambdas": [None],
        "record": msgspec.to_builtins(schedule),
    }


def largest_file(source: ExportSource, roles: list[Role], dtype: torch.dtype | None) -> int:
    """Returns the bytes of the tensors of the largest file, which are in memory at once."""
    # torch.save needs the whole of a file in memory, and one file is made at a time.
    models = [sum(cast_bytes(entry, dtype) for entry in source.entries(role).values()) for role in roles]
    return max([*models, moments_bytes(source, roles)])


def moments_bytes(source: ExportSource, roles: list[Role]) -> int:
    """Returns the bytes of the optimizers' state of these roles; 0 if the checkpoint holds none."""
    if not source.has("optimizer"):
        return 0
    prefixes = tuple(f"{role}." for role in roles)
    return sum(e.num_bytes for name, e in source.entries("optimizer").items() if name.startswith(prefixes))


def _schedules(source: ExportSource, roles: list[Role]) -> dict[str, Schedule]:
    path = source.reader.directory / "scheduler.json"
    try:
        schedules = msgspec.json.decode(source.reader.read(path.name), type=dict[str, Schedule])
    except msgspec.MsgspecError as error:
        raise _unknown(path, error, "a schedule of each role") from error
    for role in roles:
        if role not in schedules:
            raise _unknown(path, f"nothing of {role}", "a schedule of each role")
    return schedules


def _unknown(where: object, found: object, expected: object) -> SchemaMismatch:
    return SchemaMismatch(
        "the checkpoint is not laid out as this version knows it",
        where=where,
        found=found,
        expected=expected,
        remedy="export with the version of verl-slurm that wrote it",
    )
