"""Decides when this run saves and what it reports about its storage, by calling the pure decisions.

Rank 0 measures and plans the interval, and all ranks take its number. `CostMeter` knows the times of whole
steps alone. A save costs the extra length of the steps that it overlapped, against the median step without a
save: it also competes for cores, memory and disk.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.best import Best, is_new_best
from verl_slurm.checkpoint.decide.cadence import (
    Costs,
    Interval,
    SaveDue,
    decide,
    is_partial_due,
    plan_interval,
)
from verl_slurm.checkpoint.decide.storage import need_of_next
from verl_slurm.checkpoint.store.medium import StorageNotice, StorageWatch
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.files import read_history
from verl_slurm.journal.history import History, mean_time_between
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.reporter import Reporter
from verl_slurm.trainer.state.train_state import TrainState

# Newest steps and saves that count. Answers grow longer over a run, so old measurements no longer apply.
_MEASURED = 16


class CostMeter:
    """Receives each whole step and each save of this process; `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mark: tuple[int, float] | None = None
        self._under_way = self._touched = self._counts = False
        self._plain: deque[float] = deque(maxlen=_MEASURED)
        self._beside: list[float] = []
        self._costs: deque[float] = deque(maxlen=_MEASURED)
        self._left_out_s = 0.0

    @property
    def step_s(self) -> float | None:
        """Returns the seconds of a step without a concurrent save; None: there was none yet."""
        return median(self._plain) if self._plain else None

    @property
    def save_s(self) -> float | None:
        """Returns the training seconds that a save costs; None: not known yet."""
        return median(self._costs) if self._costs else None

    def step_end(self, step: int) -> None:
        """Records that `step` whole steps are done; the first of a process does not count."""
        now = self._clock()
        # Without a mark it is the first step of this process, with its compiling and first allocations.
        if self._mark is not None and step > self._mark[0]:
            count = step - self._mark[0]
            spent = max(now - self._mark[1] - self._left_out_s, 0.0) / count
            (self._beside if self._touched else self._plain).extend([spent] * count)
            # A save that still runs touches the next step, too.
            self._touched = self._under_way
        self._mark, self._left_out_s = (step, now), 0.0
        # Only once the save is over and a step stands clear of it: a save may cost several steps a little.
        if self._beside and not self._touched:
            if self._plain and self._counts:
                # At least 0: where steps differ in length, a save can look like a gain.
                self._costs.append(max(sum(self._beside) - len(self._beside) * median(self._plain), 0.0))
            self._beside = []

    def leave_out(self, seconds: float) -> None:
        """Subtracts `seconds` from the current step."""
        # An evaluation would otherwise count as the cost of a save.
        self._left_out_s += seconds

    def save_began(self, *, counts: bool = True) -> None:
        """Records that a save now runs beside the steps; `counts`: its cost is asked for."""
        # Steps that a partial save has touched already are too long for this one's cost.
        self._counts = counts and (self._counts or not self._touched)
        self._under_way = self._touched = True

    def save_ended(self) -> None:
        """Records that the save is durable or has failed."""
        self._under_way = False


_FILES_PER_RANK = 8
# A measured interval drifts all the time. It is reported again once it has changed by this factor since the last
# report.
_WORTH_SAYING = 1.25


class SavePace:
    """One rank's view of when to save.

    Args:
        step: whole steps done at the start.
        state_bytes: estimated size of the first checkpoint.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        ranks: Collective,
        reporter: Reporter,
        *,
        step: int,
        state_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._ranks, self._reporter, self._clock = config, ranks, reporter, clock
        # A checkpoint that was resumed from counts as a save, or each start would begin with one.
        self._last_save = step
        self._saving = False
        self._said: Interval | None = None
        self._began = clock()
        self._meter = CostMeter(clock)
        self._durable_s: deque[float] = deque(maxlen=_MEASURED)
        self._num_files = _FILES_PER_RANK * ranks.world_size
        past = _read(paths) if ranks.rank == 0 else History()
        self._num_lossy, self._run_s = past.num_lossy, past.allocated_seconds()
        # Earlier attempts wrote to the same storage, so their saves tell what the first one here needs.
        earlier = past.measured_saves(_MEASURED)
        basis = "the last save" if earlier else "models and optimizers"
        self._storage = StorageWatch(
            "the run's storage",
            paths.checkpoints,
            estimate=need_of_next(earlier[-1][0] if earlier else state_bytes, self._num_files, basis=basis),
            earlier=earlier,
        )
        self._looking: threading.Thread | None = None
        self._seen: tuple[StorageNotice, ...] = ()

    def due(self, state: TrainState) -> SaveDue:
        """Returns whether a save is due at this position, the same on every rank. Collective."""
        position = state.position
        # Step 0 has nothing to lose: a fresh start gives the same numbers.
        if position.phase != "step_end" or position.step == 0:
            return SaveDue(save=False, reason="in the midst of a step")
        self._meter.step_end(position.step)
        # Asked on every rank at every step, as `_plan` may be collective.
        due = decide(
            self._config.checkpoint,
            step=position.step,
            total_steps=self._config.train.steps,
            last_save=self._last_save,
            interval=self._plan(state),
            under_way=self._saving,
        )
        # A best step that is not saved at once is lost: the next one has other weights.
        best = Best.of(self._config.checkpoint)
        if not due.save and is_new_best(state.history, best):
            return SaveDue(
                save=True, reason=f"the best {best.metric} so far: {state.history[-1][best.metric]:g}"
            )
        return due

    def evaluated(self, seconds: float) -> None:
        """Records that the ending step included an evaluation of `seconds`."""
        self._meter.leave_out(seconds)

    def partial_due(self, state: TrainState) -> SaveDue:
        """Returns the same for a partial save, at a position without a full one."""
        position, none = state.position, SaveDue(save=False, reason="no full save is made here")
        if position.phase != "step_end":
            return SaveDue(save=False, reason="in the midst of a step")
        return is_partial_due(self._config.checkpoint, step=position.step, full=none)

    def partial_starts(self) -> None:
        """Records the begin of a partial save."""
        self._saving = True
        # It slows steps down, too, but must not count as the cost of a full save.
        self._meter.save_began(counts=False)

    def partial_ends(self) -> None:
        """Records that the partial save succeeded or failed."""
        self._saving = False
        self._meter.save_ended()

    def save_starts(self, step: int) -> None:
        """Records the begin of a save after `step` whole steps, and measures free space in the background."""
        # Recorded at the attempt, not at success: if every save fails, not every step should try.
        self._last_save, self._saving = step, True
        self._meter.save_began()
        # One look at a time: where storage does not answer, threads would pile up.
        if self._ranks.rank == 0 and (self._looking is None or not self._looking.is_alive()):
            # In a thread: a file system that has gone away does not answer, and training must go on.
            self._looking = threading.Thread(target=self._look, name="storage", daemon=True)
            self._looking.start()

    def saved(self, *, num_bytes: int, seconds: float) -> None:
        """Records a save of `num_bytes` over all ranks that was durable `seconds` after its begin."""
        self._end()
        self._durable_s.append(seconds)
        if self._ranks.rank == 0:
            self._tell(self._storage.saved(num_bytes, seconds, self._num_files))

    def save_failed(self, reason: str) -> None:
        """Records a failed save."""
        self._end()
        if self._ranks.rank == 0:
            self._tell(self._storage.failed(reason))

    def _look(self) -> None:
        self._seen = self._storage.before_save()

    def _end(self) -> None:
        """Ends the previous save. Reports first what was seen when it began."""
        self._saving = False
        self._meter.save_ended()
        # The save itself went to the same file system and returned, so the answer follows within a moment.
        if self._looking is not None:
            # Bounded all the same: a rank that waits here passes no safe point.
            self._looking.join(timeout=1.0)
            self._tell(self._seen)
            self._seen = ()

    def _plan(self, state: TrainState) -> Interval:
        config, step = self._config.checkpoint, state.position.step
        if config.cadence == "young_daly":
            # The other ranks give 0, so that the maximum is rank 0's number.
            planned = Interval(steps=0, reason="as rank 0 measured")
            if self._ranks.rank == 0:
                planned = plan_interval(config, step=step, history=state.history, costs=self._costs())
            # By rank 0's clock for all: a save that not all ranks begin never ends.
            agreed = Interval(steps=self._ranks.max([planned.steps])[0], reason=planned.reason)
        else:
            # From step and history, which are the same on every rank: nothing has to be agreed on.
            agreed = plan_interval(config, step=step, history=state.history)
        self._say_if_changed(agreed)
        return agreed

    def _costs(self) -> Costs:
        # This attempt counts as well: one without an interruption is what makes the mean time between them longer.
        run_s = self._run_s + max(self._clock() - self._began, 0.0)
        expected_s = self._config.checkpoint.expected_mtbi_h * 3600.0
        return Costs(
            step_s=self._meter.step_s,
            save_s=self._meter.save_s,
            durable_s=median(self._durable_s) if self._durable_s else None,
            mtbi_s=mean_time_between(self._num_lossy, run_s, expected_s),
        )

    def _say_if_changed(self, interval: Interval) -> None:
        """Reports an interval whose number has changed enough since the last report."""
        before, cadence = self._said, self._config.checkpoint.cadence
        if cadence == "fixed":
            return
        if before is not None:
            ratio = interval.steps / before.steps
            # A measured interval drifts with each save; one that a table gives changes when a row begins.
            small = cadence == "young_daly" and 1 / _WORTH_SAYING < ratio < _WORTH_SAYING
            if small or interval.steps == before.steps:
                return
        self._said = interval
        text = f"saves once in {interval.steps} steps: {interval.reason}"
        self._reporter.notice(text, topic="cadence")

    def _tell(self, notices: tuple[StorageNotice, ...]) -> None:
        for notice in notices:
            self._reporter.notice(notice.text, topic="storage", loud=notice.loud)


def _read(paths: RunPaths) -> History:
    try:
        return read_history(paths)
    except OSError:
        return History()  # the journal informs; without it the previous belief stands
