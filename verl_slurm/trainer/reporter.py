"""Reports of a rank: messages to its daemon, one line a step on stdout, curves for TensorBoard.

Nothing here changes a number of the training or may stop it. The daemon is told first.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from verl_slurm.config.roles import EVAL_PREFIX
from verl_slurm.loops.session import Session
from verl_slurm.save.ranks.saver import SavedCheckpoint
from verl_slurm.trainer.measures import console
from verl_slurm.trainer.state.position import Position
from verl_slurm.wire.messages import MAX_NOTICE, Topic

if TYPE_CHECKING:
    from torch.utils import tensorboard as tb


def progress_line(row: dict[str, float], timings: dict[str, float], total_steps: int) -> str:
    """Formats one finished step for people: `step 12/30 reward 0.412 kl 0.031 ...`."""
    # GRPO has no critic.
    value = f"  value loss {row['value_loss']:.4f}" if "value_loss" in row else ""
    return (
        f"step {row['step']:.0f}/{total_steps}"
        f"  reward {row['reward']:.3f}  kl {row['kl']:.4f}"
        f"  policy loss {row['policy_loss']:+.4f}{value}"
        f"  {timings['tokens_per_second']:.0f} tokens/s"
        f"  generate {timings['generate_s']:.2f} s  score {timings['score_s']:.2f} s"
        f"  update {timings['update_s']:.2f} s"
    )


class Reporter:
    """Reports of one rank: its session's, and for people a line and curves.

    Args:
        tensorboard: where rank 0 writes its curves.
        first_step: whole steps done at the start.
        gpu_memory: percent of this rank's GPU in use; None without one.
    """

    def __init__(
        self,
        session: Session,
        *,
        total_steps: int,
        tensorboard: Path,
        first_step: int,
        gpu_memory: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.session, self._rank, self._total_steps = session, session.rank, total_steps
        self._gpu_memory = gpu_memory
        self._step, self._stall_s = first_step, 0.0
        self._num_failed = 0
        self._has_warned_of_equal_rewards = False
        self._writer: tb.SummaryWriter | None = None
        if self._rank == 0:
            # A directory for curves that cannot be made stops nothing.
            self._curves(lambda: self._open_curves(tensorboard, first_step))

    def at(self, position: Position, new_rollouts: int, metrics: dict[str, float] | None = None) -> None:
        """Reports that a safe point was reached; `position` comes next."""
        # From every rank: a hang is found, and blamed, rank by rank; the others wait for the one with the fewest.
        self.session.safe_points += 1
        self.session.tell_progress(
            position.step,
            metrics or {},
            phase=position.phase,
            index=position.index,
            new_rollouts=new_rollouts,
            gpu_memory_percent=self._gpu_memory(),
        )

    def step_done(self, row: dict[str, float], timings: dict[str, float]) -> None:
        """Writes the line and the curves of a finished step, from rank 0."""
        self.say(progress_line(row, timings, self._total_steps))
        # A full disk loses a line of steps.jsonl, never a step.
        if problem := self.session.log_step(row | timings | {"stall_s": self._stall_s}):
            self.complain(problem)
        # Once for each start: `status` counts the steps.
        if row.get("equal_rewards") == 1.0 and not self._has_warned_of_equal_rewards:
            self._has_warned_of_equal_rewards = True
            text = f"step {row['step']:.0f}: all rewards equal ({row['reward']:.4g}): nothing is learned from them"
            self.notice(text, topic="reward", loud=True)
        curves = {
            name if "/" in name else f"train/{name}": value for name, value in row.items() if name != "step"
        }
        curves |= {f"time/{name}": value for name, value in timings.items()}
        # A stall belongs to the step in which the training waited, whatever save it waited for.
        curves["save/stall_s"], self._stall_s = self._stall_s, 0.0
        self._step = int(row["step"])
        self._curves(lambda: self._draw(curves, self._step))

    def evaluated(self, row: dict[str, float], seconds: float, news: str) -> None:
        """Reports the numbers of an evaluation in a step's row: one line for the log and the journal."""
        found = "  ".join(
            f"{name} {value:.4g}" for name, value in row.items() if name.startswith(EVAL_PREFIX)
        )
        text = f"step {row['step']:.0f}: {found}  in {seconds:.1f} s{news}"
        self.notice(text, topic="evaluation")

    def stalled(self, seconds: float) -> None:
        """Reports that training waited `seconds` for a save."""
        self._stall_s += seconds

    def saved(self, request_id: int, done: SavedCheckpoint, why: str) -> None:
        """Reports a checkpoint in place: rank 0 says so, why it was made, and which medium does not have it."""
        # The daemon first: it acts on the message, and the disk may be too full for a line.
        self.session.saved(
            request_id,
            done.name,
            seconds=done.seconds,
            num_bytes=done.num_bytes,
            reason=why,
            on_shared=done.on_shared,
            problem=done.problem,
        )
        if self._rank == 0:
            self.say(f"saved {done.name} ({done.num_bytes} bytes, {done.seconds:.2f} s): {why}")
            if done.problem:
                self.complain(f"degraded: {done.name} is {done.problem}")
            curves = {"save/seconds": done.seconds, "save/bytes": float(done.num_bytes)}
            curves["save/one_copy"] = float(bool(done.problem))
            self._curves(lambda: self._draw(curves, self._step))

    def save_failed(self, request_id: int, reason: str) -> None:
        self.session.save_failed(request_id, reason)
        if self._rank == 0:
            self.complain(f"save failed: {reason}")
            self._num_failed += 1
            self._curves(lambda: self._draw({"save/failed": float(self._num_failed)}, self._step))

    def notice(self, text: str, *, topic: Topic, loud: bool = False) -> None:
        """Sends a notice to the daemon, which journals it, and to the log; from rank 0."""
        self.session.notice(text, topic=topic, loud=loud)
        # Cut as the session cuts it, so that log and journal say the same.
        (self.complain if loud else self.say)(text[:MAX_NOTICE])

    def complain(self, text: str) -> None:
        """Reports a problem that does not stop the training; one line on stderr, from rank 0."""
        if self._rank == 0:
            console.complain(text)

    def say(self, text: str) -> None:
        """Writes one line to stdout, from rank 0."""
        if self._rank == 0:
            console.say(text)

    def close(self) -> None:
        if self._writer is not None:
            self._curves(self._writer.close)

    def _open_curves(self, directory: Path, first_step: int) -> None:
        # Imported here: the other ranks need not pay for it.
        from torch.utils.tensorboard import SummaryWriter

        directory.mkdir(mode=0o700, exist_ok=True)
        # An earlier attempt may have drawn steps that are done again from here; purged, the curve has each step once.
        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1)

    def _draw(self, curves: dict[str, float], step: int) -> None:
        if self._writer is None:
            return
        for name, value in curves.items():
            self._writer.add_scalar(name, value, step)
        # At each step: a rank may be killed, and the writer's own thread flushes every two minutes.
        self._writer.flush()

    def _curves(self, work: Callable[[], None]) -> None:
        """Does `work` on the curves. After its first failure this process writes no more curves."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever a file system or writer thinks of, training goes on
            # Not closed: close would try to write once more.
            self._writer = None
            self.complain(f"no curves for TensorBoard from here on: {error}")
