"""Our sampling inside vLLM: a logits processor that leaves vLLM's greedy search one choice.

It picks the token as `trainer.rollout.sampling` does. A processor may only return logits. So its rows hold
the log probability of the picked token at that token and minus infinity elsewhere: argmax takes the token,
and with `logprobs_mode="processed_logits"` vLLM returns that number as its log probability.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from verl_slurm.trainer.rollout.sampling import pick_tokens

_UNIFORMS, _TEMPERATURE = "verl_slurm_uniforms", "verl_slurm_temperature"


def request(uniforms: list[float], temperature: float, eos_ids: Sequence[int]) -> SamplingParams:
    """Returns the parameters of vLLM's request for one response.

    Args:
        uniforms: one in [0, 1) for each token that the response may have.
        temperature: 0: greedy.
        eos_ids: each ends the response, and is part of it.
    """
    return SamplingParams(
        max_tokens=len(uniforms),
        # Greedy: with one finite logit in a row, argmax has one choice.
        temperature=0.0,
        logprobs=0,  # the chosen token's
        detokenize=False,
        ignore_eos=True,  # vLLM's own, of config.json alone; ours are the next line
        stop_token_ids=list(eos_ids),
        # Not vLLM's own seeds: they give other samples than the engine hf, and their generator's position is
        # state.
        extra_args={_UNIFORMS: uniforms, _TEMPERATURE: temperature},
    )


class _Row:
    def __init__(self, params: SamplingParams, output: list[int]) -> None:
        said = params.extra_args or {}
        self.uniforms: list[float] = said[_UNIFORMS]
        self.temperature: float = said[_TEMPERATURE]
        self._output = output  # vLLM's own list, which grows

    @property
    def uniform(self) -> float:
        # By the tokens made so far, not by the calls.
        return self.uniforms[len(self._output)]


class CounterSampling(LogitsProcessor):  # type: ignore[misc]  # untyped where vLLM is not installed
    """Picks every token of every request."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        # It decides the argmax, so vLLM may not skip it for greedy requests.
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the requests as vLLM moves them in its batch: first removed, then added, then moved."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        # An index that is added replaces what was there.
        for index, params, _, output in batch_update.added:
            self._rows[index] = _Row(params, output)
        for source, target, how in batch_update.moved:
            moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if other is not None and how == MoveDirectionality.SWAP:
                self._rows[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        """Maps float32 [requests, vocabulary] to the same shape, with one finite number per row."""
        rows = [self._rows[index] for index in range(logits.shape[0])]
        uniform = torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=logits.device)
        # all requests of one call, which has one temperature
        (temperature,) = {row.temperature for row in rows}
        tokens, logprobs = pick_tokens(logits, uniform, temperature)
        # The number at the token is its log probability: vLLM returns it with `processed_logits`.
        chosen = torch.full_like(logits, float("-inf"))
        return chosen.scatter_(-1, tokens.unsqueeze(-1), logprobs.unsqueeze(-1))
