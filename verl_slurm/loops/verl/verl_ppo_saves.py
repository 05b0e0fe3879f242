"""Connects verl's loops to `StepEndSaver`: PPO's hooks at a step's end, and the verdict on either loop's end. No verl.

verl's PPO driver alone reports for the run, as rank 0 of 1. Its loop asks twice at a step's end: before a periodic
save, which then also answers a request, and after it (`loops.verl.verl_ppo`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.checkpoint.format.specification import guest_directory
from verl_slurm.loops.step_end import StepEndSaver
from verl_slurm.wire.messages import SaveRequest


class Saves:
    """The saves of one start, in verl's driver."""

    def __init__(self, saver: StepEndSaver) -> None:
        self.saver = saver
        self._total, self._began, self._said = 0, 0, 0
        self._metrics: Mapping[str, object] = {}
        self._before: Mapping[str, object] = {}
        self._open: tuple[int, int] | None = None

    def begin(self, step: int, total: int) -> None:
        """Reports that the loop continues after `step` of `total` steps."""
        self._began, self._said, self._total = step, step, total
        self.saver.begin(step, total)

    def numbers(self, metrics: Mapping[str, object]) -> None:
        """Sets the map in which verl collects the running step's numbers, as far as they are known at a save."""
        self._before, self._metrics = self._metrics, metrics

    def save(self, step: int, write: Callable[[], None]) -> None:
        """Saves after `step`, as verl wants to. verl's files are complete when `write` returns."""
        # Asked before a periodic save, which then answers the request as well: one save instead of two.
        self._asked(step)
        self._save(step, write)

    def leave_early(self, step: int, write: Callable[[], None]) -> bool:
        """Answers a request to stop while the step after `step` is being sampled, and its end cannot be reached. Saves
        the last update if there is time; returns whether the loop must end here.
        """
        # Until the step is sampled, weights and optimizers are those of the end of the last one.
        saver = self.saver
        if not saver.leave_early():
            return False
        request, save_s = saver.request, saver.session.save_s
        assert request is not None
        left_s = request.seconds_left
        if step == 0:
            saver.session.save_failed(request.request_id, "no step is done yet")
        elif saver.saved_step != step and save_s is not None and left_s is not None and left_s < save_s:
            why = f"step {step} is not saved: a save takes {save_s:.1f} s, and {left_s:.1f} s are left"
            saver.session.save_failed(request.request_id, why)
        else:
            # The numbers are those of the step that is saved.
            self._metrics = self._before
            self._save(step, write)
        return True

    def step_end(self, step: int, write: Callable[[], None]) -> bool:
        """Runs after a step, and after its periodic save; returns whether the loop must end here."""
        # Still open: no periodic save of this step has answered it.
        if self._asked(step) is not None:
            self._save(step, write)
        return self.saver.stopping is not None

    def step_done(self, step: int, metrics: Mapping[str, object]) -> None:
        """Reports that a step's work is done and its numbers are known; once per step."""
        # verl comes here twice where a step ends by a request: before its save, and with its metrics.
        if step != self._said:
            self._said = step
            self.saver.step_done(step, metrics)

    def validates(self, num_pending: int, num_running: int) -> None:
        """Takes how many prompts of a validation verl waits for; where that has changed, the run lives."""
        # The wait itself tells nothing: verl would wait for a dead engine, too.
        now, before = (num_pending, num_running), self._open
        self._open = now
        if now != before:
            self.saver.session.alive()

    def end(self, step: int) -> None:
        """Handles the end of verl's loop after `step`. Raises VerlSlurmError as `last_words`."""
        # First: the last commit may still be running, and the verdict depends on it.
        self.saver.end()
        last_words(self.saver, step=step, total=self._total, began=self._began)

    def _asked(self, step: int) -> SaveRequest | None:
        request = self.saver.asked()
        if request is not None and request.stop:
            # verl never passes on the last numbers of a step that it leaves
            self.step_done(step, self._metrics)
        return request

    def _save(self, step: int, write: Callable[[], None]) -> None:
        name, last = guest_directory("verl", step), step >= self._total
        if not self.saver.session.has_run:
            write()  # where verl itself does
            return
        store = self.saver.files(name, write)
        self.saver.save(step, store, metrics=self._metrics, why="trainer.save_freq", last=last)


def last_words(saver: StepEndSaver, *, step: int, total: int, began: int) -> None:
    """Reports the result of verl's loop by the step that it reached: verl exits with 0 in any case.

    Args:
        began: whole steps done when it began.

    Raises:
        VerlSlurmError: a crash: it ended unasked before its last step, or its end is not saved.
    """
    session, done = saver.session, step >= total
    # `began`: an earlier attempt did the last step, and this one had nothing to do.
    if done and (not session.has_run or step in (began, saver.saved_step)):
        session.finished(step)
    # After the question above: a stop that comes in the last step leaves a run that is done.
    elif saver.stopping is not None:
        saver.leave()
    # Not finished: a run without its last weights would be reported as done. The restart trains from the newest save.
    elif done:
        raise VerlSlurmError(
            "the last step is done and could not be saved",
            where=session.paths.root,
            found=f"the newest save is of step {max(saver.saved_step, 0)}",
            expected=f"step {total}",
            remedy="the reason stands above, and in `verl-slurm status`",
        )
    else:
        require_all(step, total, began, where=session.paths.root if session.has_run else None)


def require_all(step: int, total: int, began: int, *, where: Path | None) -> None:
    """Raises VerlSlurmError if verl ended before its last step."""
    if step >= total:
        return
    raise VerlSlurmError(
        "verl ended without a single step" if step == began else "verl ended before its last step",
        where=where,
        found=f"step {step}",
        expected=f"step {total}",
        remedy="look at trainer.total_epochs and at the data's length; see the log above",
    )
