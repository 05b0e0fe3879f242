"""Evaluation on the held-out prompts, in pieces, beside the training and without a trace in it.

What it computes is a function of the actor's weights, the held-out prompts, the seed and the step. What it leaves
behind is a few numbers of the step's row. Its noise has streams of its own, every generator is put back, and the
sampler gets the weights that the next step samples with. So training goes on with the same bits whether it was made
or not.

Nothing of it is saved half done: a run that is stopped in the middle makes all of it again.
"""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl_slurm.config.metric_names import EVAL_PREFIX
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.data import Batch, PromptData
from verl_slurm.trainer.objective.counter_rng import Purpose
from verl_slurm.trainer.reward.scoring import Reward, decode_responses
from verl_slurm.trainer.rollout.engines import RolloutEngine

__all__ = ["Evaluator", "num_pieces"]


def num_pieces(num_prompts: int, size: int, world_size: int) -> int:
    """Micro-batches of `size` that every rank comes by; the last may leave some ranks without one.

    All ranks need the same number: between two pieces they agree on whether to go on.
    """
    return -(-num_prompts // (size * world_size))


class Evaluator:
    """One rank's share of every evaluation.

    Args:
        data: the held-out prompts, all of them (`PromptData(held_out=...)`).
        size: prompts sampled at once.
        temperature: 0: greedy.
        ranks: all that have a sampler; rank r of N has every N-th micro-batch from r on.

    Runs on every rank.
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
        eos_id: int,
    ) -> None:
        self._data, self._sampler, self._tokenizer, self._reward = data, sampler, tokenizer, reward
        self._size, self._temperature, self._eos_id = size, temperature, eos_id
        self._ranks, self._pieces = ranks, num_pieces(len(data), size, ranks.world_size)
        self._step: int | None = None
        self._done = 0
        self._sums = [0.0] * 5

    def begun(self, step: int) -> bool:
        """Whether the evaluation of this step is under way or done, in this process."""
        return self._step == step

    def begin(self, step: int) -> None:
        """From the start; the sampler has the weights already."""
        self._step, self._done, self._sums = step, 0, [0.0] * 5

    @property
    def finished(self) -> bool:
        """No piece is left to do, of the evaluation that was begun last, if one was."""
        return self._step is None or self._done == self._pieces

    def piece(self) -> None:
        """The next micro-batch of this rank. Collective only if the sampler is."""
        assert self._step is not None, "begin first"
        start = (self._done * self._ranks.world_size + self._ranks.rank) * self._size
        count = max(min(self._size, len(self._data) - start), 0)
        # Without a prompt left, a sampler that works in groups is asked for nothing, together with the others.
        if count or self._sampler.collective:
            kept = rng.capture()
            try:
                found = self._measure(self._data.batch(start, count), self._step)
            finally:
                rng.restore(kept)  # a reward or an engine may draw from them
            self._sums = [a + b for a, b in zip(self._sums, found, strict=True)]
        self._done += 1

    def take(self) -> dict[str, float]:
        """The numbers of a whole evaluation over all ranks, for the step's row; nothing if none was made. Collective.

        Names begin with `eval/`: reward and its deviation over the prompts, response_tokens a prompt, finished (the
        share of responses that came to an end of their own), prompts.
        """
        if self._step is None or not self.finished:
            return {}
        self._step = None
        count, total, squares, tokens, ended = self._ranks.sum(self._sums)
        mean = total / count
        numbers = {
            "reward": mean,
            "reward_std": max(squares / count - mean * mean, 0.0) ** 0.5,
            "response_tokens": tokens / count,
            "finished": ended / count,
            "prompts": count,
        }
        return {EVAL_PREFIX + name: value for name, value in numbers.items()}

    @torch.no_grad()
    def _measure(self, prompts: Batch, step: int) -> list[float]:
        batch = self._sampler.generate(
            prompts, step, temperature=self._temperature, purpose=Purpose.EVALUATION
        )
        ids, mask = batch["sample_id"], batch["response_mask"]
        if not len(ids):
            return [0.0] * len(self._sums)
        scores: Tensor = self._reward(
            self._data.prompts(ids), decode_responses(self._tokenizer, batch), self._data.answers(ids)
        )
        scores = scores.double().cpu()
        ended = ((batch["response_ids"] == self._eos_id) & mask).any(dim=1)
        return [
            float(len(mask)),
            float(scores.sum()),
            float((scores * scores).sum()),
            float(mask.sum()),
            float(ended.sum()),
        ]
