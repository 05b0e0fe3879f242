"""Samples from the policy with Hugging Face's models, with noise that depends on its key alone.

Inverse-CDF sampling picks each token with a counter-based uniform (`counter_rng`), so no generator is
consumed. A sample is the same alone, in any batch, on any rank, and after any restart (to the rounding of the
matrix kernels). Forward passes, masks and cache are Hugging Face's; the loop is ours.

On a GPU each token after the first replays one recorded CUDA graph (`GraphDecoder`). A graph wants the same
memory each time: a cache of full length, over which attention rounds differently, always with the same bits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig, StaticCache
from transformers.cache_utils import StaticLayer

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.families import REFUSED
from verl_slurm.config.schema import Attention, RolloutConfig
from verl_slurm.export.causal_lm import accepted, names
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.models import copy_weights, load_causal_lm
from verl_slurm.trainer.objective.counter_rng import Purpose, uniforms


def _running_sum(x: Tensor) -> Tensor:
    """Returns the inclusive sum along the last dimension, the same bits every time."""
    # On a CPU it is deterministic.
    if x.device.type == "cpu":
        return x.cumsum(dim=-1)
    return _doubling_scan(x)


def _doubling_scan(x: Tensor) -> Tensor:
    # CUDA's floating-point cumsum is refused by torch.use_deterministic_algorithms. A scan by doubling
    # (Hillis and Steele 1986) is log2(V) additions in a fixed order.
    shift = 1
    while shift < x.shape[-1]:
        x = torch.cat([x[..., :shift], x[..., shift:] + x[..., :-shift]], dim=-1)
        shift *= 2
    return x


def pick_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Samples one token per row from softmax(logits / temperature) by inverting its CDF.

    Args:
        logits: float32 [N, V].
        uniform: float64 [N], in [0, 1).
        temperature: 0 is greedy, and the log probabilities are those of temperature 1.

    Returns:
        tokens int64 [N] and their log probabilities float32 [N] under that same distribution.
    """
    # Greedy takes no noise. Its log probabilities are those of temperature 1, as 0 has none.
    if not temperature:
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        best = logprobs.argmax(dim=-1, keepdim=True)
        return best.squeeze(-1), logprobs.gather(-1, best).squeeze(-1)
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    # float64: in float32 the sum of 150,000 probabilities would round whole tail tokens away.
    cdf = _running_sum(logprobs.double().exp())
    # Scaled by the total, which is 1 only up to rounding. `right`: a token of probability 0 is never picked.
    point = (uniform.to(cdf.device) * cdf[:, -1]).unsqueeze(-1)
    # clamp: rounding may put the point beyond the last sum.
    tokens = torch.searchsorted(cdf, point, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def _cache_argument(model: nn.Module) -> str | None:
    """Returns the name by which a model takes its cache, or None: `cache` in newer releases of transformers."""
    return next((name for name in ("cache", "past_key_values") if names(model, name)), None)


def _plain_model(path: Path, dtype: str, attention: Attention, device: torch.device) -> Any:
    """Loads a Hugging Face model that only samples; Any, because its results have no types."""
    model: Any = load_causal_lm(path, dtype=dtype, attention=attention)
    # `generate` itself checks this before it makes such a cache. Few have one of their own (MiniMax, OLMo Hybrid).
    # State-space models (Mamba) say yes, too, and newer releases give their state the cache's name.
    usual = model._supports_default_dynamic_cache() and model.config.model_type not in REFUSED
    if not (usual and _cache_argument(model)):
        raise ConfigError(
            "this model keeps what it has read in a form of its own, and rollout.engine=hf knows only the usual one",
            where="rollout.engine",
            found=type(model).__name__,
            expected="a model that takes a DynamicCache of transformers",
            remedy="set rollout.engine=vllm, or another model.path",
        )
    for (
        buffer
    ) in model.buffers():  # else views of the file, which may change later; `sync` has the parameters
        buffer.data = buffer.data.clone()
    return model.requires_grad_(False).to(device)


class HFRollout:
    """A whole copy of the actor on every rank, and the sampler on top.

    Args:
        model_path: Hugging Face model directory; only its shape matters, `sync` brings the weights.
        eos_ids: the tokens that end a response (`export.causal_lm.end_tokens`).

    Raises:
        ConfigError: a model that has a cache of its own.
    """

    collective = False

    def __init__(
        self,
        model_path: Path,
        config: RolloutConfig,
        *,
        seed: int,
        eos_ids: Sequence[int],
        pad_id: int,
        dtype: str = "float32",
        attention: Attention = "auto",
        device: torch.device | None = None,
    ) -> None:
        self._model = _plain_model(model_path, dtype, attention, device or torch.device("cpu"))
        self._takes_cache_as = _cache_argument(self._model) or ""  # `_plain_model` has refused those without
        # Launching the kernels takes 35 ms for 32 responses of 0.4 billion parameters on an H100, where
        # reading the weights takes 0.6 ms.
        self._records = (
            not config.enforce_eager
            and self._model.device.type == "cuda"
            and config.max_new_tokens > 1
            and can_record(self._model.config)
        )
        # By the number of rows and the temperature: of training, and of evaluation.
        self._decoders: dict[tuple[int, float], GraphDecoder] = {}
        self._config, self._seed, self._pad_id = config, seed, pad_id
        self._eos_ids = torch.tensor(eos_ids)

    def sync(self, actor: nn.Module) -> None:
        """Copies the actor's weights. Collective where the actor is sharded; once a step."""
        copy_weights(actor, self._model)

    @torch.no_grad()
    def generate(
        self,
        prompts: Batch,
        step: int,
        *,
        temperature: float | None = None,
        purpose: Purpose = Purpose.SAMPLE_TOKEN,
    ) -> Batch:
        """Samples one response for each prompt. Not collective: ranks may call it any number of times.

        Args:
            prompts: sample_id [N], prompt_ids [N, P], prompt_mask [N, P], from `PromptData.batch`.
            temperature: 0: greedy. None: the configuration's.

        Returns:
            The prompts' columns and response_ids int64 [N, T] (right-padded), response_mask bool [N, T]
            (true up to and including the end-of-sequence token), logprobs float32 [N, T] (0 outside the
            mask). All on the CPU; T is always `max_new_tokens`.
        """
        num = len(prompts["prompt_ids"])
        num_tokens = self._config.max_new_tokens
        device = next(self._model.parameters()).device
        # The noise is keyed by these, never by a row's place in the batch.
        ids: list[int] = prompts["sample_id"].tolist()
        noise = torch.from_numpy(uniforms(self._seed, step, ids, num_tokens, purpose=purpose))
        heat = self._config.temperature if temperature is None else temperature
        asked = prompts["prompt_ids"].to(device), prompts["prompt_mask"].long().to(device), noise.to(device)
        decode = self._recorded if self._records else self._decode
        made, chosen_at = decode(*asked, heat)
        response = torch.full((num, num_tokens), self._pad_id, dtype=torch.int64)
        response[:, : made.shape[1]] = made
        logprobs = torch.zeros((num, num_tokens), dtype=torch.float32)
        logprobs[:, : made.shape[1]] = chosen_at
        # Padding may be the same token; the sum below counts the first end alone.
        ended = torch.isin(response, self._eos_ids).long()
        # True where the response has not ended before this position; the end itself still counts.
        mask = (ended.cumsum(dim=1) - ended) == 0
        # All rows had ended before: what is behind was never sampled.
        mask[:, made.shape[1] :] = False
        return {
            **prompts,
            "response_ids": response.masked_fill(~mask, self._pad_id),
            "response_mask": mask,
            "logprobs": logprobs.masked_fill(~mask, 0.0),
        }

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Returns the logits after the last column, float32 [N, V]; the cache takes what was read."""
        words = accepted(
            self._model,
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._takes_cache_as: cache},
        )
        logits: Tensor = self._model(**words).logits
        return logits[:, -1].float()

    def _recorded(self, ids: Tensor, mask: Tensor, uniform: Tensor, heat: float) -> tuple[Tensor, Tensor]:
        """The same as `_decode`, by a recorded graph."""
        rows, prompt = ids.shape
        if (rows, heat) not in self._decoders:
            self._decoders[rows, heat] = GraphDecoder(
                self._forward,
                partial(pick_tokens, temperature=heat),
                self._model.config,
                rows=rows,
                prompt=prompt,
                new=self._config.max_new_tokens,
                pad_id=self._pad_id,
                eos_ids=self._eos_ids,
                device=self._model.device,
            )
        return self._decoders[rows, heat].decode(ids, mask, uniform)

    def _decode(self, ids: Tensor, mask: Tensor, uniform: Tensor, heat: float) -> tuple[Tensor, Tensor]:
        """Returns tokens [N, t] and their log probabilities, on the CPU, until the last row has ended."""
        # Not Hugging Face's `generate`: it repeats its preparation for each micro-batch, and these are small.
        # By the configuration: layers with a sliding window keep another kind of cache.
        cache = DynamicCache(config=self._model.config)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        ends = self._eos_ids.to(ids.device)
        made: list[Tensor] = []
        chosen_at: list[Tensor] = []
        # One uniform per token, drawn beforehand: a row's noise does not depend on how long other rows are.
        for column in uniform.unbind(dim=1):
            tokens, logprobs = pick_tokens(self._forward(ids, mask, positions, cache), column, heat)
            # A finished row goes on with padding: without it the batch would have another shape, and other roundings.
            tokens = tokens.masked_fill(ended, self._pad_id)
            made.append(tokens)
            chosen_at.append(logprobs)
            ended |= torch.isin(tokens, ends)
            # The test waits for the device once per token; the rest of the loop would be sampled for nothing.
            if bool(ended.all()):
                break
            # The cache has the rest.
            ids, positions = tokens.unsqueeze(-1), positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        return torch.stack(made, dim=1).cpu(), torch.stack(chosen_at, dim=1).cpu()


Forward = Callable[[Tensor, Tensor, Tensor, StaticCache], Tensor]
"""(ids [N, t], mask [N, L], positions [N, t], cache) to float32 logits [N, V] of the last column."""
Pick = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits, uniform [N]) to tokens [N] and their log probabilities [N]."""

_LOOK_EVERY = 32
"""Tokens between two looks at whether all rows have ended: each waits for the device."""
_WARM_UPS = 2


def can_record(config: PretrainedConfig) -> bool:
    """Returns whether every layer keeps all keys."""
    # A layer with a sliding window counts its tokens in Python, which a graph does not repeat.
    return all(type(layer) is StaticLayer for layer in StaticCache(config, max_cache_len=1).layers)


class GraphDecoder:
    """The decoder of one shape of batch, with memory of its own.

    Args:
        pick: `pick_tokens` at one temperature.
        rows, prompt, new: N, P and T.
        eos_ids: the tokens that end a response, [E].
        device: a CPU has no graphs, and computes the same token by token: for tests.
    """

    def __init__(
        self,
        forward: Forward,
        pick: Pick,
        config: PretrainedConfig,
        *,
        rows: int,
        prompt: int,
        new: int,
        pad_id: int,
        eos_ids: Tensor,
        device: torch.device,
    ) -> None:
        self._forward, self._pick = forward, pick
        self._pad_id, self._eos_ids, self._new = pad_id, eos_ids.to(device), new
        self._cache = StaticCache(config, max_cache_len=prompt + new)
        whole = torch.zeros(0, dtype=torch.int64, device=device)
        self._ids, self._positions = whole.new_zeros(rows, 1), whole.new_zeros(rows, 1)
        # The columns behind the newest token are ones from the beginning: causality leaves them out.
        self._mask = whole.new_ones(rows, prompt + new)
        self._noise = torch.zeros(rows, new, dtype=torch.float64, device=device)
        self._ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self._at = whole.new_zeros(1)
        self._tokens = whole.new_zeros(rows, new)
        self._logprobs = torch.zeros(rows, new, dtype=torch.float32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_cuda = device.type == "cuda"

    def decode(self, ids: Tensor, mask: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens [N, T] and their log probabilities, on the CPU; a finished row goes on with padding.

        Args:
            ids, mask: int64 [N, P], left-padded.
            uniform: float64 [N, T].
        """
        if self._is_cuda and self._graph is None:
            self._record(ids, mask, uniform)
        self._start(ids, mask, uniform)
        for made in range(1, self._new):
            # Whatever is sampled behind the last end is padding.
            if made % _LOOK_EVERY == 0 and bool(self._ended.all()):
                break
            if self._graph is None:
                self._one()
            else:
                self._graph.replay()
        return self._tokens.cpu(), self._logprobs.cpu()

    def _start(self, ids: Tensor, mask: Tensor, uniform: Tensor) -> None:
        """Reads the prompts and samples the first token. Prompts are one shape more, and are not recorded."""
        self._cache.reset()  # type: ignore[no-untyped-call]
        self._mask[:, : mask.shape[1]] = mask
        self._noise.copy_(uniform)
        self._ended.zero_()
        self._at.zero_()
        self._tokens.fill_(self._pad_id)
        self._logprobs.zero_()
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        self._take(self._forward(ids, self._mask, positions, self._cache))
        self._positions.copy_(positions[:, -1:] + 1)

    def _one(self) -> None:
        self._take(self._forward(self._ids, self._mask, self._positions, self._cache))
        self._positions.add_(1)

    def _take(self, logits: Tensor) -> None:
        """Samples from logits; only work on the device, into memory that stays."""
        column = self._noise.index_select(1, self._at).squeeze(1)
        tokens, logprobs = self._pick(logits, column)
        tokens = tokens.masked_fill(self._ended, self._pad_id)
        self._tokens.index_copy_(1, self._at, tokens.unsqueeze(1))
        self._logprobs.index_copy_(1, self._at, logprobs.unsqueeze(1))
        # Not torch.isin, which may sort: what is recorded must have one course.
        self._ended.logical_or_((tokens.unsqueeze(1) == self._eos_ids).any(dim=1))
        self._ids.copy_(tokens.unsqueeze(1))
        self._at.add_(1)

    def _record(self, ids: Tensor, mask: Tensor, uniform: Tensor) -> None:
        # On a stream of its own, and not the first time: libraries allocate their workspaces then.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._start(ids, mask, uniform)
            for _ in range(min(_WARM_UPS, self._new - 1)):
                self._one()
        torch.cuda.current_stream().wait_stream(stream)
        # From a place that has room for one token more, though what is recorded does not run.
        self._start(ids, mask, uniform)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._one()
        self._graph = graph
