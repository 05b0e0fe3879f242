"""What a data-parallel rank writes into the rollout ledger. A ledger that fails costs time, and no training."""

from verl_slurm.runtime_state.ledger import Ledger
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.measures import console
from verl_slurm.trainer.state.position import StepShape
from verl_slurm.trainer.state.train_state import to_arrays

__all__ = ["record", "settle", "take_back"]


def record(ledger: Ledger, dp_rank: int, step: int, micro_batch: int, batch: Batch) -> None:
    """Write a finished micro-batch; it becomes durable while the next one is sampled. Without its record it would be
    sampled again after a crash; no reason to crash now.
    """
    try:
        ledger.append(step, micro_batch, to_arrays(batch))
    except OSError as error:
        console.complain(f"dp rank {dp_rank}: rollout not written to the ledger: {error}")


def settle(ledger: Ledger, dp_rank: int) -> None:
    """The last micro-batch of a step is written, and no other follows for a while: wait until it is durable."""
    try:
        ledger.settle()
    except OSError as error:
        console.complain(f"dp rank {dp_rank}: the newest rollout may not outlast its node: {error}")


def take_back(ledger: Ledger, dp_rank: int, step: int, shape: StepShape) -> None:
    """The rollouts of a step are refused: no start shall replay this rank's, from whichever segment."""
    try:
        for index in range(shape.generations):
            ledger.append(step, index * shape.dp_size + dp_rank, {})
        ledger.settle()
    except OSError as error:
        console.complain(
            f"dp rank {dp_rank}: what is refused stays in the ledger, move it away before the next start: {error}"
        )
