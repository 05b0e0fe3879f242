"""Tensor parallelism of Llama-like decoders: heads and hidden units of every layer are dealt out to the ranks.

As in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): query, key, value, gate and up projections by columns, the
output and down projections by rows, so a layer adds up over its ranks twice forward and twice backward. The
vocabulary is cut, too, where it divides: the embedding by rows, the head by columns, its logits gathered. Norms and
the critic's head stay whole; every rank of the group computes the same update of them, because it gets the same bits
from the sums.

Exact: the same shape gives the same bits every time, interrupted or not. To tolerance: against another number of
tensor-parallel ranks, for sums over hidden units are made in another order.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from verl_slurm.base.errors import ConfigError

__all__ = ["cut_tensors"]

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def cut_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a Hugging Face decoder, in place, over a mesh of one axis. Before FSDP2. Collective.

    Args:
        model: with `model.layers`, and perhaps `model.embed_tokens` and `lm_head`.
        mesh: of tensor-parallel ranks; one of them: nothing is done.

    Raises:
        ConfigError: its layers are not of the kind that this knows.
    """
    if mesh.size() == 1:
        return
    for layer in model.get_submodule("model.layers").children():
        plan: dict[str, ParallelStyle] = {}
        for names, style in ((_COLUMNS, ColwiseParallel), (_ROWS, RowwiseParallel)):
            plan |= {name: style() for name in names}
        _require(layer, plan)
        parallelize_module(layer, mesh, plan)
    _cut_vocabulary(model, mesh)


def _require(layer: nn.Module, plan: dict[str, ParallelStyle]) -> None:
    linear = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    if linear != plan.keys():
        raise ConfigError(
            "tensor parallelism does not know this kind of layer",
            where="distributed.tp_size",
            found=f"{type(layer).__name__}: {', '.join(sorted(linear ^ plan.keys()))}",
            expected="the projections of Qwen2, Llama or Mistral",
            remedy="set distributed.tp_size=1",
        )


def _cut_vocabulary(model: nn.Module, mesh: DeviceMesh) -> None:
    inner = model.get_submodule("model")
    embedding, head = getattr(inner, "embed_tokens", None), getattr(model, "lm_head", None)
    tied = None not in (embedding, head) and head.weight is embedding.weight  # type: ignore[union-attr]
    if embedding is not None and embedding.num_embeddings % mesh.size() == 0:
        style: ParallelStyle = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(embedding, mesh, style)
    if head is not None and head.out_features % mesh.size() == 0:
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    if tied:
        # Cutting gave each a tensor of its own; they were cut the same way.
        head.weight = embedding.weight  # type: ignore[union-attr]
