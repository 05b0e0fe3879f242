"""Which tensors a checkpoint holds, by name. The live ones, not copies: loading fills them in place.

```
actor/      <parameter or buffer>                      as Hugging Face names them
critic/     <parameter or buffer>
optimizer/  <role>.<parameter>.{step,exp_avg,exp_avg_sq}
```

Tensors only: hyper-parameters are the configuration's, so no pickled value ever lies in a shard. A tied
weight is one tensor under its first name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

Tensors = dict[str, Tensor]
"""Name to tensor; sharded ones are DTensors."""


def model_tensors(model: nn.Module) -> Tensors:
    """Every parameter once, and the persistent buffers; they share memory with the model."""
    _reshard(model)
    # Further names of tied weights are in the state dict, too, and are no buffers.
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    # The state dict leaves out buffers that are not persistent: they are computed anew.
    buffers = {name: value for name, value in model.state_dict().items() if name not in aliases}
    return tensors | {name: value for name, value in buffers.items() if isinstance(value, Tensor)}


def optimizer_tensors(parts: Mapping[str, tuple[nn.Module, Optimizer]]) -> Tensors:
    """Returns the state tensors of each role's (model, optimizer), as `initialise_adamw` has made them."""
    tensors: Tensors = {}
    for role, (model, optimizer) in parts.items():
        _reshard(model)
        for name, parameter in model.named_parameters():
            # Frozen parameters have no optimizer state.
            if not parameter.requires_grad:
                continue
            for key, value in sorted(optimizer.state[parameter].items()):
                tensors[f"{role}.{name}.{key}"] = value
    return tensors


def initialise_adamw(optimizer: Optimizer, *, to_be_loaded: bool = False) -> None:
    """Gives every parameter the state that AdamW gives it at its first update; `to_be_loaded`: unwritten."""
    # So a save before the first update, and a load into a fresh process, find the same tensors.
    # The first touch of memory costs more than a load's copy, and the threads of a load do it while others wait for
    # storage.
    make = torch.empty_like if to_be_loaded else torch.zeros_like
    with left_as_it_is() if to_be_loaded else nullcontext():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # Not by torch's own helper (`_init_optim_state`): it makes an empty update, which counts a step that
                # never was.
                optimizer.state[parameter] = {
                    # On the CPU and a float32, as AdamW makes it itself.
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": make(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": make(parameter, memory_format=torch.preserve_format),
                }


@contextmanager
def left_as_it_is() -> Iterator[None]:
    """Memory that is written whole before it is read."""
    # Where deterministic algorithms are asked for, torch fills all that is new with NaN.
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills


def _reshard(model: nn.Module) -> None:
    # A forward without backward leaves the root's whole (and not its own).
    if isinstance(model, FSDPModule):
        model.reshard()
