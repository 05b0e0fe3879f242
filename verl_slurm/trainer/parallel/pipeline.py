"""Pipeline parallelism: contiguous layers on each stage, under the names they have in the whole model.

A stage runs Hugging Face's own decoder without the other stages' layers, so masks, rotary positions and kernels are
those of the whole model. Training passes run in 1F1B order by torch's `Schedule1F1B` (Narayanan et al. 2019, PipeDream;
memory for as many micro-batches as there are stages, not for all). Scoring passes go through once.

Exact: the same shape gives the same bits every time. To tolerance: against another number of stages, because with FSDP2
gradients are summed over micro-batches before they are averaged over ranks, not after.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from verl_slurm.base.errors import ConfigError

LossOf = Callable[[Tensor, Tensor], Tensor]
"""Maps (logits of a micro-batch, its rows int64 in the mini-batch) to a scalar loss."""


@dataclass(frozen=True)
class Line:
    """The stages of one model, and this rank's index among them.

    Attributes:
        group: on the device's backend, in the order of the stages.
    """

    index: int
    count: int
    group: dist.ProcessGroup

    @classmethod
    def along(cls, mesh: DeviceMesh) -> "Line":
        """Returns the line of a mesh of one axis."""
        return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group())

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


@dataclass(frozen=True, kw_only=True)
class Passage:
    """The inputs of a batch that every stage gets whole.

    Attributes:
        ids, mask, positions: int64 [N, L].
        keep: positions at the end for which the head is asked.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    keep: int

    def rows(self, rows: Tensor) -> "Passage":
        """Returns the passage of the given rows."""
        return replace(self, ids=self.ids[rows], mask=self.mask[rows], positions=self.positions[rows])


def layers_of(stage: int, stages: int, num_layers: int) -> range:
    """Returns the layers of one stage; if they do not divide, later stages have one more."""
    return range(num_layers * stage // stages, num_layers * (stage + 1) // stages)


def owner_of(name: str, stages: int, num_layers: int) -> int:
    """Returns the stage that has parameter `name` of a Hugging Face decoder."""
    if name.startswith("model.embed_tokens."):
        return 0
    prefix = "model.layers."
    if name.startswith(prefix):
        layer = int(name.removeprefix(prefix).partition(".")[0])
        return next(stage for stage in range(stages) if layer in layers_of(stage, stages, num_layers))
    return stages - 1


def cut_stage(whole: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Returns this rank's stage of `whole`, or all of it with one stage. Not collective.

    Args:
        whole: a Hugging Face decoder with a head; it is taken apart.

    Raises:
        ConfigError: fewer layers than stages, or the head shares its weight with the embedding.
    """
    return whole if mesh.size() == 1 else Stage(whole, Line.along(mesh))


@dataclass
class _Schedules:
    """Caches one schedule for each number and shape of micro-batches, so that buffers are made once."""

    made: dict[tuple[int, ...], Schedule1F1B] = field(default_factory=dict)


class Stage(nn.Module):
    """One rank's layers, with the embedding on the first stage, and the norm and the head on the last.

    Attributes:
        directory: name, shape and stage of every parameter of the whole model, in its order.
        compute_dtype: of tensors sent between stages, if it differs from that of the parameters (mixed precision).
    """

    def __init__(self, whole: nn.Module, line: Line) -> None:
        super().__init__()
        # Before it is taken apart: other families pass hidden states through modules that a stage would not have.
        _require_plan(whole)
        inner: Any = whole.get_submodule("model")
        head = "lm_head" if hasattr(whole, "lm_head") else "score"
        num_layers = len(inner.layers)
        _require(whole, inner, head, num_layers, line)
        self.line = line
        self.compute_dtype: torch.dtype | None = None
        self.directory = [
            # Of the whole model, so before the layers go: a sampler on any stage needs every parameter, in one order.
            (name, tuple(parameter.shape), owner_of(name, line.count, num_layers))
            for name, parameter in whole.named_parameters()
        ]
        self._hidden_size = int(inner.config.hidden_size)
        self._keep = 0
        self._loss_of: LossOf | None = None
        self._schedules = _Schedules()
        mine = layers_of(line.index, line.count, num_layers)
        # Under their old keys: a checkpoint's names must not depend on the number of stages.
        kept = nn.ModuleList([inner.layers[i] for i in mine])
        # The decoder walks through the values in order; the keys determine the parameters' names.
        kept._modules = {str(i): layer for i, layer in zip(mine, kept.children(), strict=True)}
        inner.layers = kept
        # Some decoders also look up the kind of attention of each layer by its index.
        if types := getattr(inner.config, "layer_types", None):
            inner.config.layer_types = [types[i] for i in mine]
        # The decoder walks through as many layers as its configuration says.
        inner.config.num_hidden_layers = len(mine)
        if not line.is_first:
            # Freed: each rank holds its own stage and no more.
            inner.embed_tokens = None
        if not line.is_last:
            # The decoder calls it at its end; the hidden states go on to the next stage as they are.
            inner.norm = nn.Identity()
        self.model = inner
        if line.is_last:
            self.add_module(head, whole.get_submodule(head))
        self._head = head

    def forward(self, x: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Runs one micro-batch through this stage.

        Args:
            x: token ids [N, L] for the first stage, else hidden states [N, L, H].

        Returns:
            Hidden states [N, L, H]; from the last stage logits [N, keep, V].
        """
        given = {"input_ids" if self.line.is_first else "inputs_embeds": x}
        output = self.model(
            **given, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        hidden: Tensor = output.last_hidden_state
        if not self.line.is_last:
            return hidden
        # The last positions alone: nobody reads the logits of the prompt.
        logits: Tensor = self.get_submodule(self._head)(hidden[:, -self._keep :])
        return logits

    def score_pass(self, passage: Passage) -> Tensor | None:
        """Runs one micro-batch through all stages: logits [N, keep, V] on the last, else None. Collective."""
        line, self._keep = self.line, passage.keep
        x = passage.ids
        if not line.is_first:
            # Every stage has the whole passage, so it knows the shape: nothing has to be said beforehand.
            x = torch.empty(self._hidden_shape(passage), dtype=self._dtype(), device=passage.ids.device)
            dist.recv(x, group=line.group, group_src=line.index - 1)
        out = self(x, passage.mask, passage.positions)
        if line.is_last:
            return cast(Tensor, out)
        # Blocking, as is recv: a scoring pass has one micro-batch, so there is nothing to overlap.
        dist.send(out.contiguous(), group=line.group, group_dst=line.index + 1)
        return None

    def train_pass(self, passage: Passage, micro_batch: int, loss_of: LossOf) -> None:
        """Runs forward and backward of a mini-batch, 1F1B over its micro-batches; adds to the gradients. Collective.

        Args:
            passage: the whole mini-batch, the same on every stage.
            micro_batch: rows of one; divides the mini-batch into at least as many as there are stages.
            loss_of: called on the last stage only. Losses are added up, not averaged.
        """
        num_rows = len(passage.ids)
        schedule = self._schedule(passage, micro_batch)
        # The schedule calls `forward` and `_loss` by itself and hands neither of them these.
        self._keep, self._loss_of = passage.keep, loss_of
        given: dict[str, Any] = {"attention_mask": passage.mask, "position_ids": passage.positions}
        ids = (passage.ids,) if self.line.is_first else ()
        # The row numbers are the target: split like the inputs, they tell the loss which rows a micro-batch has.
        rows = torch.arange(num_rows) if self.line.is_last else None
        schedule.step(*ids, target=rows, return_outputs=False, **given)
        self._loss_of = None

    def _schedule(self, passage: Passage, micro_batch: int) -> Schedule1F1B:
        num = len(passage.ids) // micro_batch
        # All that the shapes of its buffers follow from.
        key = (num, micro_batch, passage.ids.shape[1], passage.keep)
        made = self._schedules.made
        if key not in made:
            made[key] = self._make_schedule(passage, num, micro_batch)
        return made[key]

    def _make_schedule(self, passage: Passage, num: int, micro_batch: int) -> Schedule1F1B:
        line = self.line
        # The examples carry a gradient, so that the schedule expects one back.
        made: dict[str, Any] = {"dtype": self._dtype(), "device": "meta", "requires_grad": True}
        hidden = torch.empty((micro_batch, *self._hidden_shape(passage)[1:]), **made)
        ids, out = passage.ids[:micro_batch].to("meta"), hidden
        if line.is_last:
            width = int(cast(nn.Linear, self.get_submodule(self._head)).out_features)
            out = torch.empty((micro_batch, passage.keep, width), **made)
        stage = PipelineStage(
            self,
            line.index,
            line.count,
            passage.ids.device,
            # Stated here, so that the stages need not exchange shapes.
            input_args=(ids if line.is_first else hidden,),
            output_args=(out,),
            group=line.group,
        )
        # Losses come divided by the whole mini-batch, so gradients are not scaled by the number of micro-batches again.
        return Schedule1F1B(stage, num, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        if self._loss_of is None:
            raise RuntimeError("a loss is asked for outside of a training pass")
        return self._loss_of(logits, rows)

    def _hidden_shape(self, passage: Passage) -> tuple[int, int, int]:
        num, length = passage.ids.shape
        return num, length, self._hidden_size

    def _dtype(self) -> torch.dtype:
        return self.compute_dtype or next(self.parameters()).dtype


_PLAN = {"embed_tokens", "layers", "norm"}


def _require_plan(whole: Any) -> None:
    """Requires transformers' own pipeline plan, which names the modules that hidden states go through."""
    plan = whole.config.base_model_pp_plan or {}
    if set(plan) != _PLAN:
        raise ConfigError(
            "this model cannot be cut into stages",
            where="distributed.pp_size",
            found=f"{whole.config.model_type}: {', '.join(plan) or 'no plan'}",
            expected=", ".join(sorted(_PLAN)),
            remedy="set distributed.pp_size=1",
        )


def _require(whole: nn.Module, inner: Any, head: str, num_layers: int, line: Line) -> None:
    what, where = "this model cannot be cut into that many stages", "distributed.pp_size"
    if num_layers < line.count:
        raise ConfigError(
            what,
            where=where,
            found=f"{line.count} stages, {num_layers} layers",
            remedy=f"set it to {num_layers} or less",
        )
    # First and last stage would each have a copy, and their gradients are never added up.
    if whole.get_submodule(head).weight is inner.embed_tokens.weight:
        raise ConfigError(
            what,
            where=where,
            found="an embedding and a head that share one weight (tie_word_embeddings)",
            expected="one of its own for the last stage",
            remedy="set distributed.pp_size=1",
        )
