"""What the ranks say of themselves, kept as numbers: pure; the clock is an argument.

Where a rank did not say something (its GPU's memory, without a GPU) there is no number, not a zero.
"""

from verl_slurm.config.schema import RunConfig
from verl_slurm.wire.messages import FromRank, Progress, RankStarted

__all__ = ["LiveNumbers", "queue_length"]


def queue_length(config: RunConfig, phase: str, index: int) -> int:
    """Responses of the running step, on all ranks, that are sampled and that training has not done with yet.

    The ranks pass their safe points together, so one rank's position says it for all.

    Args:
        phase, index: the position of `Progress`: what comes next.
    """
    per_rank = config.train.batch_size_per_device
    if phase == "step_end":
        return 0
    if phase == "generate":
        per_rank = min(index * config.rollout.micro_batch_size_per_device, per_rank)
    return per_rank * config.distributed.dp_size


class LiveNumbers:
    """The newest word of each rank of one restart.

    Args:
        ranks: that there are; no other has a number.
    """

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self.heard: dict[int, float] = {}
        """When each rank last passed a safe point, by the caller's monotonic clock."""
        self.gpu_percent: dict[int, float] = {}
        """Memory in use of each rank's GPU, of all there is."""
        self.rollouts_at: float | None = None
        """When new rollouts were last in the ledger."""
        self.num_rollouts = 0
        """Sampled (not replayed) since this process began."""
        self._rollouts: dict[int, int] = {}

    def new_generation(self) -> None:
        """Other ranks now: nothing of the former ones is said any more."""
        self.heard, self.gpu_percent, self._rollouts = {}, {}, {}

    def feed(self, message: FromRank, now: float) -> None:
        """Add one message."""
        if message.rank not in self._ranks:
            return
        match message:
            case RankStarted():
                self.heard[message.rank] = now
            case Progress():
                self.heard[message.rank] = now
                if message.gpu_memory_percent is not None:
                    self.gpu_percent[message.rank] = message.gpu_memory_percent
                more = message.new_rollouts - self._rollouts.get(message.rank, 0)
                if more > 0:
                    self._rollouts[message.rank] = message.new_rollouts
                    self.num_rollouts += more
                    self.rollouts_at = now
            case _:
                pass

    def safe_point_age(self, now: float) -> float | None:
        """Seconds since the last safe point of the rank that is furthest behind; None before the first word."""
        return max(now - min(self.heard.values()), 0.0) if self.heard else None
