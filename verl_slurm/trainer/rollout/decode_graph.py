"""Samples all tokens of a batch after the first by replaying one recorded CUDA graph for each.

Of a small model's token, nearly all time goes to Python and to launching kernels: 35 ms for 32 responses of 0.4 billion
parameters on an H100, where reading the weights takes 0.6 ms. A graph is launched at once. It wants the same memory
each time: a cache of full length (`StaticCache`), and inputs that each token writes for the next.

Attention over a cache of full length adds in another order than over one that grows, so the two round differently. With
either, the same call gives the same bits.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PretrainedConfig, StaticCache
from transformers.cache_utils import StaticLayer

Forward = Callable[[Tensor, Tensor, Tensor, StaticCache], Tensor]
"""(ids [N, t], mask [N, L], positions [N, t], cache) to float32 logits [N, V] of the last column."""
Pick = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits, uniform [N]) to tokens [N] and their log probabilities [N]."""

_LOOK_EVERY = 32
"""Tokens between two looks at whether all rows have ended: each waits for the device."""
_WARM_UPS = 2


def can_record(config: PretrainedConfig) -> bool:
    """Returns whether every layer keeps all keys: one with a sliding window counts its tokens in Python, which a
    graph does not repeat.
    """
    return all(type(layer) is StaticLayer for layer in StaticCache(config, max_cache_len=1).layers)


class GraphDecoder:
    """The decoder of one shape of batch, with memory of its own.

    Args:
        forward: the model.
        pick: `pick_tokens` at one temperature.
        config: the model's.
        rows, prompt, new: N, P and T.
        pad_id: the tokenizer's.
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
