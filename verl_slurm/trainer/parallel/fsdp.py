"""Shards a model over its data axis with FSDP2, and yields its whole parameters again, however it is cut.

Each decoder layer is wrapped, with or without mixed precision and recomputing. Exact: with `recompute` every number is
the one without it, to the bit, because the same operators see the same inputs again. To tolerance: mixed precision
against float32, by bfloat16's eight bits.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from verl_slurm.export.causal_lm import decoder_layers
from verl_slurm.trainer.parallel.pipeline import Stage


def policy_of(mixed_precision: str) -> MixedPrecisionPolicy:
    """Returns FSDP2's policy; with `bfloat16` shards, sums of gradients and AdamW stay float32."""
    if mixed_precision == "none":
        return MixedPrecisionPolicy()
    # Gradients are summed in float32: in bfloat16 the sum over many ranks loses the small ones.
    return MixedPrecisionPolicy(param_dtype=getattr(torch, mixed_precision), reduce_dtype=torch.float32)


_ONE_UNIT_BYTES = 25 << 20
"""As long as the messages of torch's DDP (`bucket_cap_mb`; Li et al. 2020, VLDB 13 (12), section 3.2.3)."""


def shard_over_data(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Applies FSDP2 over a mesh of one axis. Collective.

    Each decoder layer is a group, and the rest is one more; each is gathered when needed and released after
    use. A model as small as one message is one group, which stays gathered from its first use until its
    weights change. Shards and checkpoints are the same either way.
    """
    # One message: in shorter ones a collective's start costs more than its bytes.
    if sum(p.numel() * p.element_size() for p in model.parameters()) <= _ONE_UNIT_BYTES:
        # Stays gathered: every rank has room for it, and would wait for each layer twice in each pass.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        return
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # What is left: embedding, last norm and head.
    fully_shard(model, mesh=mesh, mp_policy=policy)


def recompute_layers(model: nn.Module) -> None:
    """Makes every decoder layer drop its activations until the backward pass. Before `shard_over_data`."""
    for layer in decoder_layers(model):
        # Hugging Face's own switch works in training mode only; these models are in eval mode (no dropout).
        # Inside FSDP2's hooks, so that a layer's parameters are there when it is computed again.
        layer.forward = _forgetting(layer.forward)


def _forgetting(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Nothing in a layer draws random numbers, so no generator has to be restored.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter by name, whole, one after the other, on every rank. Collective, to the end.

    One at a time, so that never more than one whole parameter exists beside the model. But a model of one
    FSDP2 group is gathered at once and stays so.
    """
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.reshard()  # a forward without backward leaves some gathered
    mine: dict[str, Tensor] = dict(model.named_parameters())
    # Gathered once as a whole: the passes that score the samples need the same weights right after.
    if len(groups) == 1:
        mine = _gathered(model, groups[0]) or mine
    if not isinstance(model, Stage):
        yield from ((name, _whole(parameter)) for name, parameter in mine.items())
        return
    like = next(iter(mine.values()))
    # In the whole model's order on every stage, or the broadcasts of two parameters would meet.
    for name, shape, owner in model.directory:
        if owner == model.line.index:
            tensor = _whole(mine[name]).contiguous()
        else:
            tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
        dist.broadcast(tensor, group=model.line.group, group_src=owner)
        yield name, tensor


def _gathered(model: nn.Module, group: FSDPModule) -> dict[str, Tensor] | None:
    """Returns all parameters as a forward pass sees them; None: those have another precision than their own."""
    dtypes = [parameter.dtype for parameter in model.parameters()]
    group.unshard()
    # With mixed precision FSDP2 gathers bfloat16 copies; a sampler gets the float32 weights.
    same = dtypes == [parameter.dtype for parameter in model.parameters()]
    return dict(model.named_parameters()) if same else None


def _whole(parameter: Tensor) -> Tensor:
    plain = parameter.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain
