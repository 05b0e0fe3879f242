"""Tensor parallelism by transformers' own plan: divides heads and hidden units of every layer among the ranks.

The plan is `base_model_tp_plan` of the model's configuration class: a word for each projection (`_STYLES`). As in
Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053) query, key, value, gate and up projections are cut by columns, the
output and down projections by rows. So a layer sums over its ranks twice forward and twice backward. The vocabulary is
cut, too, where it divides: the embedding by rows, the head by columns, its logits gathered. Norms and the critic's head
stay whole; every rank of the group computes the same update of them, because the sums give it the same bits. A norm of
single heads (Qwen3's `q_norm`) stays whole, too, and sees the heads of its rank alone: its gradient is summed over the
ranks before the update (`sum_head_gradients`).

Exact: the same shape gives the same bits every time, interrupted or not. To tolerance: against another number of
tensor-parallel ranks, because sums over hidden units run in another order.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from verl_slurm.base.errors import ConfigError
from verl_slurm.export.causal_lm import decoder_layers

_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}
_OF_HEADS = "replicated_with_grad_allreduce"
_LAYER = re.compile(r"\.\d+\.")


def cut_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts a decoder in place over tensor-parallel ranks, before FSDP2. Collective. Raises as `planned`."""
    if mesh.size() == 1:
        return
    base = _transformer(model)
    # All of the plan is read before anything is cut: a refusal leaves the model whole.
    words = planned(base)
    for name in (name for name, word in words.items() if word == _OF_HEADS):
        base.get_submodule(name).sees_its_heads_alone = True  # type: ignore[assignment]
    plan = {name: _STYLES[word]() for name, word in words.items() if word != _OF_HEADS}
    parallelize_module(base, mesh, plan)
    _cut_vocabulary(model, base, mesh)


def planned(base: nn.Module) -> dict[str, str]:
    """Returns the plan's word for each module that has one, by name in the transformer.

    Raises:
        ConfigError: there is no plan, or one that this trainer cannot follow; `found` says at which word or module.
    """
    config: Any = base.config
    plan = config.base_model_tp_plan
    if not plan:
        raise _refused(config, "no plan")
    found = {}
    inside = {id(part) for layer in decoder_layers(base) for part in layer.modules()}
    for name, part in base.named_modules():
        # What newer plans say of the embedding is not read: `_cut_vocabulary` cuts it together with the head.
        word = plan.get(_LAYER.sub(".*.", name)) if id(part) in inside else None
        if word is not None:
            # A word that is not understood must not leave a projection whole on every rank.
            if word != _OF_HEADS and word not in _STYLES:
                raise _refused(config, word)
            found[name] = word
    layers = {id(parameter) for layer in decoder_layers(base) for parameter in layer.parameters()}
    # Parents of projections that are cut by columns: a parameter beside one meets a part of the hidden units.
    cut = {name.rpartition(".")[0] for name, word in found.items() if word == "colwise"}
    for name, parameter in base.named_parameters():
        module = name.rpartition(".")[0]
        beside = module.rpartition(".")[0] in cut
        # A matrix that the plan leaves out stays whole; a parameter beside a cut one would get the gradient of a part.
        if id(parameter) in layers and module not in found and (parameter.dim() > 1 or beside):
            raise _refused(config, _LAYER.sub(".*.", module).removeprefix("layers.*."))
    return found


def sum_head_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sums the gradients of norms that see their rank's heads alone. Before clipping. Collective."""
    norms = [module for module in model.modules() if getattr(module, "sees_its_heads_alone", False)]
    found = [p.grad for norm in norms for p in norm.parameters() if p.grad is not None]
    if not found or mesh.size() == 1:
        return
    gradients: list[Tensor] = [g.to_local() if isinstance(g, DTensor) else g for g in found]
    # One all-reduce for all of them: they are a few hundred numbers each.
    summed = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(summed, group=mesh.get_group())
    for gradient, part in zip(gradients, torch.split(summed, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _transformer(model: nn.Module) -> nn.Module:
    """Returns the module named by `base_model_prefix`, also of critics and stages."""
    config_of: Any = model
    base: Any = getattr(config_of, "base_model", None)
    return base if base is not None else next(m for m in model.children() if hasattr(m, "base_model_prefix"))


def _refused(config: Any, found: str) -> ConfigError:
    return ConfigError(
        "tensor parallelism does not know this kind of model",
        where="distributed.tp_size",
        found=f"{config.model_type}: {found}",
        expected="a plan of transformers' with " + ", ".join(_STYLES),
        remedy="set distributed.tp_size=1",
    )


def _cut_vocabulary(model: Any, base: Any, mesh: DeviceMesh) -> None:
    embedding: Any = None
    with suppress(NotImplementedError):  # of a stage other than the first
        embedding = base.get_input_embeddings()
    # Critics and stages have no such method; a critic's head stays whole.
    ask = getattr(model, "get_output_embeddings", None)
    head: Any = ask() if ask else getattr(model, "lm_head", None)
    tied = embedding is not None and head is not None and head.weight is embedding.weight
    # An embedding of its own class (Gemma 3's) does more than look up, and knows no DTensor.
    plain = type(embedding) is nn.Embedding and embedding.num_embeddings % mesh.size() == 0
    if plain:
        parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    # Tied to an embedding that stays whole, the head has to stay whole, too.
    if head is not None and head.out_features % mesh.size() == 0 and (plain or not tied):
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    if tied:
        # Cutting gave each its own tensor; both were cut the same way.
        head.weight = embedding.weight
