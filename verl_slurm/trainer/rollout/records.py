"""Writes a rank's rollouts into the ledger, and some responses as text (`rollout.keep_samples`)."""

from collections.abc import Callable

import torch

from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.ledger import Ledger
from verl_slurm.runtime_state.samples import Sample, append_samples, clipped
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.measures import console
from verl_slurm.trainer.state.position import StepShape
from verl_slurm.trainer.state.train_state import to_arrays

Texts = Callable[[Batch], tuple[list[str], list[str], list[str]]]
"""(prompts, responses, answers) of a batch."""


class SampleLog:
    """Keeps a few responses of each step; one for a run, on rank 0.

    Args:
        count: of a step; half of them the best by reward, half the worst.
    """

    def __init__(self, paths: RunPaths, attempt: int, count: int, keys: Keyring | None) -> None:
        self._paths, self._attempt, self._count, self._keys = paths, attempt, count, keys

    def keep(self, step: int, rollouts: Batch, scored: Batch, texts: Texts) -> None:
        """Writes the step's selected responses. A failing disk is reported once, and training goes on.

        Args:
            step: whole steps done with it.
            rollouts, scored: all that this rank sampled in the step, row by row.
        """
        if not self._count:
            return
        scores = scored["scores"].float()
        # stable: equal scores keep the order of their ids, so a repeated step keeps the same samples.
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
            append_samples(self._paths, self._attempt, step, len(scores), samples, keys=self._keys)
        except OSError as error:
            # Reported once: a full disk would say the same at every step.
            self._count = 0
            console.complain(f"no samples in {self._paths.samples.name} from here on: {error}")


class RolloutRecorder:
    """Writes one data-parallel rank's rollouts into the ledger; what it does not take is told.

    Args:
        tell: for the journal, at the first record that fails and at the first one after it that does not.
    """

    def __init__(self, ledger: Ledger, dp_rank: int, tell: Callable[[str], None]) -> None:
        self._ledger, self._dp_rank, self._tell, self._unwritten = ledger, dp_rank, tell, 0

    def record(self, step: int, micro_batch: int, batch: Batch) -> None:
        """Writes a finished micro-batch; it becomes durable while the next one is sampled."""
        try:
            self._ledger.append(step, micro_batch, to_arrays(batch))
        # No reason to crash now: what is missing is sampled again after a crash.
        except OSError as error:
            if not self._unwritten:
                self._say(f"the ledger takes no rollouts: {error}; after a crash they are sampled again")
            self._unwritten += 1
        else:
            if self._unwritten:
                self._say(f"the ledger takes rollouts again; it lacks {self._unwritten} micro-batches")
            self._unwritten = 0

    def settle(self) -> None:
        """Waits until the last micro-batch of a step is durable: no other follows for a while."""
        try:
            self._ledger.settle()
        except OSError as error:
            self._say(f"the newest rollout may not outlast its node: {error}")

    def take_back(self, step: int, shape: StepShape) -> None:
        """The rollouts of a step are refused: no start shall replay this rank's, from whichever segment."""
        try:
            # All of them, also those that were never recorded: an older segment may have some of this step.
            for index in range(shape.generations):
                # An empty record: the newest one of a micro-batch counts, and this one holds nothing.
                self._ledger.append(step, index * shape.dp_size + self._dp_rank, {})
            # Durable before the rank leaves with the refusal, or the next start would replay them and refuse again.
            self._ledger.settle()
        except OSError as error:
            self._say(f"what is refused stays in the ledger, move it away before the next start: {error}")

    def _say(self, text: str) -> None:
        line = f"dp rank {self._dp_rank}: {text}"
        console.complain(line)
        self._tell(line)
