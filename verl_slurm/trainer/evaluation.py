"""Evaluates on the held-out prompts, in pieces; the training has the same bits with or without it.

The numbers are a function of the actor's weights, the held-out prompts, the seed and the step. A partial
evaluation is not saved: a run that stops in the middle repeats all of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl_slurm.config.roles import EVAL_PREFIX
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.data import Batch, PromptData
from verl_slurm.trainer.objective.counter_rng import Purpose
from verl_slurm.trainer.reward.scoring import Reward, decode_responses
from verl_slurm.trainer.rollout.engines import RolloutEngine


def num_pieces(num_prompts: int, size: int, world_size: int) -> int:
    """Returns each rank's number of micro-batches of `size`; in the last one some ranks may have none."""
    # The same on every rank: between two pieces they agree on whether to go on.
    return -(-num_prompts // (size * world_size))


class Evaluator:
    """One rank's share of every evaluation.

    Args:
        size: prompts sampled at once.
        temperature: 0: greedy.
        ranks: all that have a sampler; rank r of N takes every N-th micro-batch starting at r.
    """

    def __init__(
        self,
        *,
        data: PromptData,
        sampler: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        reward: Reward,
        size: int,
        temperature: float,
        ranks: Collective,
        eos_ids: Sequence[int],
    ) -> None:
        self._data, self._sampler, self._tokenizer, self._reward = data, sampler, tokenizer, reward
        self._size, self._temperature, self._eos_ids = size, temperature, torch.tensor(eos_ids)
        self._ranks, self._pieces = ranks, num_pieces(len(data), size, ranks.world_size)
        self._step: int | None = None
        self._done = 0
        self._sums = [0.0] * 5

    def begun(self, step: int) -> bool:
        """Returns whether this process has begun or finished the evaluation of this step."""
        return self._step == step

    def begin(self, step: int) -> None:
        """Starts an evaluation from its first piece. The sampler already has the weights."""
        self._step, self._done, self._sums = step, 0, [0.0] * 5

    @property
    def finished(self) -> bool:
        """Returns whether the evaluation begun last, if any, has no piece left."""
        return self._step is None or self._done == self._pieces

    def piece(self) -> None:
        """Evaluates the next micro-batch of this rank. Collective only if the sampler is."""
        assert self._step is not None, "begin first"
        # Dealt by global micro-batch: the number of ranks decides who samples, never what.
        start = (self._done * self._ranks.world_size + self._ranks.rank) * self._size
        count = max(min(self._size, len(self._data) - start), 0)
        # A sampler that works in groups must take part even when this rank has no prompt left.
        if count or self._sampler.collective:
            kept = rng.capture()
            try:
                found = self._measure(self._data.batch(start, count), self._step)
            finally:
                rng.restore(kept)  # a reward or an engine may draw from them
            self._sums = [a + b for a, b in zip(self._sums, found, strict=True)]
        # On every rank alike, with or without prompts: between two pieces all agree on whether to go on.
        self._done += 1

    def take(self) -> dict[str, float]:
        """Returns a whole evaluation's numbers over all ranks; empty if there was none. Collective.

        Names begin with `eval/`: reward and its deviation over the prompts, response_tokens per prompt, finished (the
        share of responses that ended by themselves), prompts.
        """
        if self._step is None or not self.finished:
            return {}
        self._step = None
        # Sums over ranks, not means of means: the last piece of a rank may be empty.
        count, total, squares, tokens, ended = self._ranks.sum(self._sums)
        mean = total / count
        numbers = {
            "reward": mean,
            # Clamped: where all scores are equal, rounding leaves a difference slightly below 0.
            "reward_std": max(squares / count - mean * mean, 0.0) ** 0.5,
            "response_tokens": tokens / count,
            "finished": ended / count,
            "prompts": count,
        }
        return {EVAL_PREFIX + name: value for name, value in numbers.items()}

    @torch.no_grad()
    def _measure(self, prompts: Batch, step: int) -> list[float]:
        # A stream of its own: sample ids count other prompts here, and would draw the noise of the training's.
        batch = self._sampler.generate(
            prompts, step, temperature=self._temperature, purpose=Purpose.EVALUATION
        )
        ids, mask = batch["sample_id"], batch["response_mask"]
        # Here for the collective sampler alone; the reward is not asked about nothing.
        if not len(ids):
            return [0.0] * len(self._sums)
        scores: Tensor = self._reward(
            self._data.prompts(ids), decode_responses(self._tokenizer, batch), self._data.answers(ids)
        )
        # float64: the sums run over all prompts.
        scores = scores.double().cpu()
        ended = (torch.isin(batch["response_ids"], self._eos_ids) & mask).any(dim=1)
        return [
            float(len(mask)),
            float(scores.sum()),
            float((scores * scores).sum()),
            float(mask.sum()),
            float(ended.sum()),
        ]
