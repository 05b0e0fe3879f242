"""Selects the responses of a step to keep as text (`rollout.keep_samples`), and writes them to `RUN/samples.jsonl`."""

from collections.abc import Callable

import torch

from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.samples import Sample, append_samples, clipped
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.measures import console

__all__ = ["SampleLog"]

Texts = Callable[[Batch], tuple[list[str], list[str], list[str]]]
"""(prompts, responses, answers) of a batch."""


class SampleLog:
    """Keeps a few responses of each step; one for a run, on data-parallel rank 0.

    Args:
        count: of a step; half of them the best by reward, half the worst.
        keys: the run's.
    """

    def __init__(self, paths: RunPaths, epoch: int, count: int, keys: Keyring | None) -> None:
        self._paths, self._epoch, self._count, self._keys = paths, epoch, count, keys

    def keep(self, step: int, rollouts: Batch, scored: Batch, texts: Texts) -> None:
        """Writes the step's selected responses. A failing disk is reported once, and training goes on.

        Args:
            step: whole steps done with it.
            rollouts, scored: all that this rank sampled in the step, row by row.
        """
        if not self._count:
            return
        scores = scored["scores"].float()
        order = torch.argsort(scores, descending=True, stable=True).tolist()
        if len(order) > self._count:
            best = -(-self._count // 2)
            order = order[:best] + order[len(order) - (self._count - best) :]
        rows = {name: column[order] for name, column in rollouts.items()}
        lengths = rows["response_mask"].sum(dim=1).tolist()
        samples = [
            Sample(
                sample_id=int(sample_id),
                prompt=clipped(prompt),
                response=clipped(response),
                answer=clipped(answer),
                reward=reward,
                response_tokens=int(length),
            )
            for sample_id, prompt, response, answer, reward, length in zip(
                rows["sample_id"].tolist(), *texts(rows), scores[order].tolist(), lengths, strict=True
            )
        ]
        try:
            append_samples(self._paths, self._epoch, step, len(scores), samples, keys=self._keys)
        except OSError as error:
            self._count = 0
            console.complain(f"no samples in {self._paths.samples.name} from here on: {error}")
