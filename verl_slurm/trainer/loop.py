"""The training of one rank, readable top to bottom: agree, save, leave, or do the next piece of work.

Every orderly end of a run is decided at one point, between two positions. All ranks pass that point together.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import msgspec
import torch

from verl_slurm.base.errors import Fenced, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.checkpoint.decide.best import Best, is_new_best
from verl_slurm.checkpoint.format.components import partial_domains
from verl_slurm.config.roles import EVAL_PREFIX
from verl_slurm.config.schema import RunConfig
from verl_slurm.loops.session import LAST_TRIES_S
from verl_slurm.save.ranks.collective import RanksFailed
from verl_slurm.save.ranks.saver import SavedCheckpoint
from verl_slurm.save.writer.handle import SaverDied
from verl_slurm.trainer.learner import Learner
from verl_slurm.trainer.measures.metrics import step_costs
from verl_slurm.trainer.measures.stopwatch import Stopwatch
from verl_slurm.trainer.reporter import Reporter
from verl_slurm.trainer.reward.swap import RewardSwap
from verl_slurm.trainer.save_pace import SavePace
from verl_slurm.trainer.saving import Checkpointer
from verl_slurm.trainer.state.position import Position, StepShape, after, safe_point
from verl_slurm.trainer.state.train_state import TrainState
from verl_slurm.wire.messages import SaveRequest
from verl_slurm.wire.reward_plan import RewardRequest
from verl_slurm.wire.stopping import Stopper


class Ending(StrEnum):
    """Why the loop returned."""

    FINISHED = "finished"
    STOPPED = "stopped"


class FinalSaveFailed(VerlSlurmError):
    """All steps are done, but the result could not be saved: a crash that another start may fix."""

    exit_code = ExitCode.INTERNAL


class SaverLost(VerlSlurmError):
    """This process can no longer save anything: a crash that another start fixes."""

    exit_code = ExitCode.INTERNAL


class Loop:
    """Drives one rank from the position of its state to the end.

    Args:
        saved_as: the checkpoint that `state` was loaded from, empty for a fresh start.
        rewards: replaces the reward between two steps; None: the reward never changes.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        shape: StepShape,
        state: TrainState,
        learner: Learner,
        checkpointer: Checkpointer,
        pace: SavePace,
        stopper: Stopper,
        reporter: Reporter,
        saved_as: str,
        rewards: RewardSwap | None = None,
    ) -> None:
        self._config, self._shape, self._state = config, shape, state
        self._learner, self._checkpointer, self._pace = learner, checkpointer, pace
        self._stopper, self._reporter, self._session = stopper, reporter, reporter.session
        self._rewards = rewards
        # The newest checkpoint that answers a request. Partial saves never stand here: no run resumes from them.
        self._saved: tuple[Position, SavedCheckpoint] | None = None
        # It answers a save request that arrives before anything has happened.
        if saved_as:
            self._saved = (state.position, SavedCheckpoint(name=saved_as, seconds=0.0, num_bytes=0))
        self._saving: _Saving | None = None
        self._save_problem: str | None = None
        self._last_tries: Sequence[float] = LAST_TRIES_S
        # Of each phase. By the clock, also on a GPU: a phase's work is waited for by the next one.
        self._phases, self._step_began = Stopwatch(torch.device("cpu")), time.perf_counter()

    def run(self) -> Ending:
        """Trains until all steps are done or the daemon asks to stop.

        Raises:
            Fenced: another attempt owns the run; this one touched nothing of it.
            FinalSaveFailed: training is complete, and its result could not be saved.
        """
        try:
            return self._run()
        finally:
            self._reporter.close()

    def _run(self) -> Ending:
        state, total = self._state, self._config.train.steps
        while True:
            # A save ends on each rank at another moment. It counts as under way until it is over on all ranks, so that
            # all settle it at the same safe point and then decide alike.
            agreed = self._stopper.agree(busy=self._saving is not None and not self._saving.outcome.done())
            # Position(total) is no work: the check stands before `_advance`, so a start of a finished run does nothing.
            request, finished = agreed.request, state.position == Position(total)
            # Before `_why_save`, which needs to know whether this position is saved and whether a save is under way.
            if not agreed.busy:
                self._settle()
            why = self._why_save(request)
            if why is not None:
                self._save(request, why)
            # Decided after the full save: where one was made, it holds the same tensors.
            elif not self._is_saved() and self._pace.partial_due(state).save:
                self._save_partial()
            # Waits for storage here: `Finished` ends the run for good, so its last checkpoint must be there first.
            if finished:
                self._settle()
                if self._tries_again():
                    continue
                self._require_saved()
                self._checkpointer.close()
                self._session.finished(total)
                return Ending.FINISHED
            if request is not None and request.stop:
                self._settle()
                self._checkpointer.close(hurry=True)
                self._session.stopped(request.request_id)
                return Ending.STOPPED
            # After a stop: a run that leaves replaces its reward in the next attempt, from the request or its record.
            if self._rewards is not None:
                self._replace_reward(self._rewards, asked=request is not None)
            self._advance()

    def _replace_reward(self, rewards: RewardSwap, *, asked: bool) -> None:
        """Replaces the reward between two steps if an operator asked for it. The state before it is saved first."""
        state = self._state
        # The file is looked for when the daemon hands a request on, not at each step: storage that is away delays none.
        if asked:
            rewards.look()
        due = rewards.due(state, self._learner.replays_until)
        if due is None:
            return
        saving = self._saving
        # A save under way at this very position holds the state before the replacement, too. A partial one does not.
        begun = saving is not None and not saving.partial and saving.position == state.position
        # A recorded switch needs no save: it was saved before it was recorded. At step 0 there is no state to lose.
        if isinstance(due, RewardRequest) and state.position.step and not (begun or self._is_saved()):
            self._save(None, "the reward is to be replaced")
        rewards.perform(due, state)

    def _advance(self) -> None:
        """Does the work of the present position and moves to the next."""
        state = self._state
        phase = state.position.phase
        # Scoring and advantages are one column for people.
        with self._phases.span({"step_end": "generate", "advantage": "score"}.get(phase, phase)):
            self._learner.work(state)
        # A piece of an evaluation is a safe point without a position of its own: a stop here repeats the whole
        # evaluation.
        if self._learner.must_stay:
            self._reporter.at(state.position, self._learner.new_rollouts)
            return
        following = after(state.position, self._shape)
        metrics: dict[str, float] = {}
        # The metrics of a step come from its buffers, which `finish_step` empties; so before the position moves on.
        if following.phase == "step_end":
            metrics = self._finish_step()
        state.position = following
        self._reporter.at(following, self._learner.new_rollouts, metrics)

    def _finish_step(self) -> dict[str, float]:
        row = self._learner.finish_step(self._state)
        before, self._step_began = self._step_began, time.perf_counter()
        timings = step_costs(
            self._phases.take(),
            self._learner.watch.take(),
            step_s=self._step_began - before,
            new_tokens=self._learner.new_tokens,
            waited_s=self._learner.take_waited_s(),
            trained_tokens=self._learner.trained_tokens,
            memory=self._learner.memory_bytes(),
        )
        self._reporter.step_done(row, timings)
        if any(name.startswith(EVAL_PREFIX) for name in row):
            best = Best.of(self._config.checkpoint)
            news = ", the best so far" if is_new_best(self._state.history, best) else ""
            # Otherwise the longer step would count as the cost of the save beside it.
            self._pace.evaluated(timings.get("eval_s", 0.0))
            self._reporter.evaluated(row, timings.get("eval_s", 0.0), news)
        return row | timings

    def _is_saved(self) -> bool:
        return self._saved is not None and self._saved[0] == self._state.position

    def _tries_again(self) -> bool:
        """Begins the last save again if it failed."""
        if not self._last_tries or (
            self._saved is not None and self._is_saved() and self._saved[1].on_shared
        ):
            return False
        # Without it the next start would do all steps since the save before again.
        pause, *self._last_tries = self._last_tries
        # Alike on all ranks: a failed save fails on all of them.
        time.sleep(pause)
        self._saved = None
        self._save(None, "the last save is tried again")
        return True

    def _require_saved(self) -> None:
        # A copy on the nodes' disks alone is no end: the nodes may never come back.
        if self._saved is None or not (self._is_saved() and self._saved[1].on_shared):
            raise FinalSaveFailed(
                "training is done, but its result is not on shared storage",
                found=self._save_problem,
                remedy="the next start does the steps since the newest checkpoint again",
            )

    def _why_save(self, request: SaveRequest | None) -> str | None:
        """Returns the reason to save at this position, or None."""
        # A request is answered even where this position is saved: the daemon waits for an answer with its id.
        if request is not None:
            return request.why
        if self._is_saved():
            return None
        # Collective with an adaptive cadence; `_is_saved` is the same on every rank, so all of them get here or none.
        due = self._pace.due(self._state)
        return due.reason if due.save else None

    def _save(self, request: SaveRequest | None, why: str) -> None:
        """Begins a save of the present position, or answers with the existing one."""
        state, request_id = self._state, request.request_id if request else 0
        position = state.position
        # Said before the wait: a rank that waits for storage passes no safe point, and would count as hanging.
        self._session.save_started(request_id, position.step, safe_point(position, self._shape))
        waited = self._settle_first()
        # Asked after the wait: the save that was in progress may have been of this position.
        if self._saved is not None and self._is_saved():
            self._reporter.saved(
                request_id, msgspec.structs.replace(self._saved[1], seconds=0.0), f"{why}; nothing new since"
            )
            return
        self._pace.save_starts(position.step)
        stop, left = request is not None and request.stop, request.seconds_left if request else None
        # The next attempt cleans up where we are to stop; now every second counts.
        outcome = self._checkpointer.begin(
            state,
            tidy=not stop,
            # The wait above has used up a part of the time that Slurm leaves.
            seconds_left=None if left is None else max(0.0, left - waited),
            # Nobody trains any more, so reading the nodes' parts back at once costs nothing.
            on_kept=partial(self._session.saved_on_nodes, request_id) if stop else None,
            on_part=partial(self._session.part_saved, request_id) if stop else None,
        )
        self._saving = _Saving(position, request_id, why, outcome)

    def _save_partial(self) -> None:
        """Begins a partial save of the present position."""
        if self._saving is not None:  # the daemon should know that what follows may be a wait for storage
            position = self._state.position
            self._session.save_started(0, position.step, safe_point(position, self._shape))
        # One arena serves full and partial saves.
        self._settle_first()
        # No run resumes from it, so no request is answered with it.
        components = partial_domains(self._config.checkpoint)
        self._pace.partial_starts()
        outcome = self._checkpointer.begin_partial(self._state, components)
        self._saving = _Saving(self._state.position, 0, ", ".join(components), outcome, partial=True)

    def _settle_first(self) -> float:
        """Waits for the save in progress; returns the seconds it took."""
        # There is one staging arena.
        if self._saving is None:
            return 0.0
        started = time.perf_counter()
        self._settle()
        waited = time.perf_counter() - started
        self._reporter.stalled(waited)
        self._reporter.say(f"training waited {waited:.2f} s: the save before was still being written")
        return waited

    def _settle(self) -> None:
        """Waits for the save that was begun, if any, and reports its outcome. All ranks at the same point."""
        if self._saving is None:
            return
        # Forgotten first: whatever is raised below, the loop must not wait for the same save again.
        saving, self._saving = self._saving, None
        try:
            done = saving.outcome.result()
        # RanksFailed comes on all ranks alike, so all of them continue, or all of them leave.
        except RanksFailed as error:
            # Reported, and training continues.
            if saving.partial:
                self._pace.partial_ends()
                text = f"partial save failed: {error.one_line()}"
                self._reporter.notice(text, topic="partial", loud=True)
            else:
                self._save_problem = error.one_line()
                self._reporter.save_failed(saving.request_id, self._save_problem)
                self._pace.save_failed(self._save_problem)
            # A rank other than the first hears of the fence as text alone; the kind of the error tells it.
            if Fenced.__name__ in error.kinds:
                raise Fenced("another attempt owns the run", found=error.found) from error
            if SaverDied.__name__ in error.kinds:
                # No later save could succeed either: a restart in place makes a new one, and replays the ledger.
                raise SaverLost("a saver process is gone", found=error.found) from error
            return
        if saving.partial:
            self._pace.partial_ends()
            text = f"saved partial/checkpoints/{done.name} ({done.num_bytes} bytes, {done.seconds:.2f} s): {saving.why}"
            self._reporter.notice(text, topic="partial")
            return
        self._saved = (saving.position, done)
        self._save_problem = done.problem or None
        self._reporter.saved(saving.request_id, done, saving.why)
        # A save that the nodes' disks alone took is no measure of shared storage.
        if done.on_shared:
            self._pace.saved(num_bytes=done.num_bytes, seconds=done.seconds)
        else:
            self._pace.save_failed(done.problem)


@dataclass(frozen=True)
class _Saving:
    """A save in progress, and the request that it answers (0: the plan)."""

    position: Position
    request_id: int
    why: str
    outcome: "Future[SavedCheckpoint]"
    partial: bool = False
