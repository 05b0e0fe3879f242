"""Keeps the ranks' reports as numbers. Pure; the clock is an argument.

A value that a rank did not report (its GPU's memory, without a GPU) has no number, rather than a zero.
"""

from verl_slurm.config.schema import RunConfig
from verl_slurm.wire.messages import FromRank, Progress, RankStarted


def queue_length(config: RunConfig, phase: str, index: int) -> int:
    """Returns how many responses of the running step, on all ranks, are sampled and not used up by training."""
    # The ranks pass their safe points together, so the position of one rank is enough.
    per_rank = config.train.batch_size_per_device
    if phase == "step_end":
        return 0
    # In every later phase all of the step's responses are sampled, and none is used up before its end.
    if phase == "generate":
        # `index` is the next piece of work: those before it are sampled.
        per_rank = min(index * config.rollout.micro_batch_size_per_device, per_rank)
    return per_rank * config.distributed.dp_size


class LiveNumbers:
    """The newest report of each rank of one restart. A rank outside `ranks` gets no number."""

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self.heard: dict[int, float] = {}
        """Time of each rank's last safe point, by the caller's monotonic clock."""
        self.gpu_percent: dict[int, float] = {}
        """Percentage of each rank's GPU memory that is in use."""
        self.rollouts_at: float | None = None
        """Time at which the ledger last received new rollouts."""
        self.num_rollouts = 0
        """Rollouts that were sampled (not replayed) since this process began."""
        self._rollouts: dict[int, int] = {}

    def new_restart(self) -> None:
        """Forgets the numbers of the former ranks: a restart has other ones."""
        self.heard, self.gpu_percent, self._rollouts = {}, {}, {}

    def feed(self, message: FromRank, now: float) -> None:
        """Adds one message."""
        # A rank's own word must not make a series of its choice.
        if message.rank not in self._ranks:
            return
        match message:
            case RankStarted():
                self.heard[message.rank] = now
            case Progress():
                self.heard[message.rank] = now
                if message.gpu_memory_percent is not None:
                    self.gpu_percent[message.rank] = message.gpu_memory_percent
                # Ranks count from their start; the page counts on over restarts.
                more = message.new_rollouts - self._rollouts.get(message.rank, 0)
                if more > 0:
                    self._rollouts[message.rank] = message.new_rollouts
                    self.num_rollouts += more
                    self.rollouts_at = now
            case _:
                pass

    def safe_point_age(self, now: float) -> float | None:
        """Returns the seconds since the last safe point of the rank furthest behind; None: no report yet."""
        return max(now - min(self.heard.values()), 0.0) if self.heard else None
