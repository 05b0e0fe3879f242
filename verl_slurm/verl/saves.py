"""Between two steps of verl's PPO trainers: where their loop meets `StepEndSaver`. Without verl.

verl's driver alone speaks for the run, as rank 0 of 1. Its loop asks twice at a step's end: before a periodic save,
which then answers a request as well, and behind it (`verl.ppo`). No exit is believed: what the loop has reached is
judged by its step.
"""

from collections.abc import Callable, Mapping

from verl_slurm.checkpoint.format import guest_directory
from verl_slurm.errors import VerlSlurmError
from verl_slurm.guest.step_end import StepEndSaver
from verl_slurm.wire.messages import SaveRequest

__all__ = ["EndNotSaved", "NothingDone", "Saves"]


class NothingDone(VerlSlurmError):
    """verl's loop ended with steps left and none done: it would do the same at every start."""


class EndNotSaved(VerlSlurmError):
    """All steps are done, and what came of the last one is in no checkpoint: a crash; another start may save it."""


class Saves:
    """Of one generation, in verl's driver.

    Attributes:
        saver: for the files of all ranks.
    """

    def __init__(self, saver: StepEndSaver) -> None:
        self.saver = saver
        self._total, self._began, self._said = 0, 0, 0
        self._metrics: Mapping[str, object] = {}

    def begin(self, step: int, total: int) -> None:
        """The loop goes on behind `step` of `total` steps."""
        self._began, self._said, self._total = step, step, total
        self.saver.begin(step, total)

    def numbers(self, metrics: Mapping[str, object]) -> None:
        """Where verl collects the running step's numbers, as far as they are known when it is saved."""
        self._metrics = metrics

    def save(self, step: int, write: Callable[[], None]) -> None:
        """verl wants to save behind `step`.

        Args:
            write: has verl write; its files are whole when it returns.
        """
        self._asked(step)
        self._save(step, write)

    def step_end(self, step: int, write: Callable[[], None]) -> bool:
        """Behind a step, and behind its periodic save.

        Args:
            write: as in `save`.

        Returns:
            Whether the loop is to end here.
        """
        if self._asked(step) is not None:
            self._save(step, write)
        if self.saver.stopping is None:
            return False
        self.saver.leave()
        return True

    def step_done(self, step: int, metrics: Mapping[str, object]) -> None:
        """All of a step's work is done and its numbers are known; said once."""
        if step != self._said:
            self._said = step
            self.saver.step_done(step, metrics)

    def end(self, step: int) -> None:
        """verl's loop has ended behind `step`.

        Raises:
            NothingDone: before its last step, and nobody had asked it to.
            EndNotSaved: a run that lost its end is not done.
        """
        saver, session = self.saver, self.saver.session
        saver.end()
        if step >= self._total:
            if not session.has_run or step in (self._began, saver.saved_step):
                session.finished(step)
            elif saver.stopping is None:
                raise EndNotSaved(
                    "the last step is done and could not be saved",
                    where=session.paths.root,
                    found=f"no checkpoint of step {step}",
                    remedy="the reason stands above, and in `verl-slurm status`",
                )
        elif saver.stopping is None:
            done = f"{step - self._began} steps of this start" if step > self._began else "no step at all"
            raise NothingDone(
                "verl's loop ended before its last step",
                found=f"step {step} of {self._total}, {done}",
                remedy="look at trainer.total_epochs and at the data's length; see the log above",
            )

    def _asked(self, step: int) -> SaveRequest | None:
        request = self.saver.asked()
        if request is not None and request.stop:
            self.step_done(step, self._metrics)  # verl's last numbers of a step that it leaves never come
        return request

    def _save(self, step: int, write: Callable[[], None]) -> None:
        name, last = guest_directory("verl", step), step >= self._total
        self.saver.save(step, name, metrics=self._metrics, why="trainer.save_freq", last=last, write=write)
