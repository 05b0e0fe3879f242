"""Simulates one run from its first start to its end, in simulated seconds. Pure: the dice are handed in.

A run is a chain of LIVES: one start of the ranks, up to the strike that ends them or to the last step. Between two
strikes nothing is random, so whole stretches of steps are one event. Decision 0027 says why no library is behind it.

A position is a step and a fraction of it. The first `sampling_share` of a step samples rollouts. What was sampled
once is in the ledger: done again, it takes `replay_cost` of its time (1: there is no ledger). The next save is due
where `cadence.decide` says so. It takes `save_s` from the training, waits for the save before, and is durable
`durable_s` after its beginning. A strike goes back to the newest durable position.

Strikes: a NOTICE (a preemption, the time limit, a spot machine that is reclaimed) leaves its warning, less the
daemon's margin, for an emergency save; a guest that saves at the end of a step alone decides by `loops.reach`. A
CRASH restarts the ranks in place. A LOST NODE costs a restart on a spare one; without one, or if the first node is
lost, a requeue.

Goodput is that of the journal (`journal.history`). ETTR is the time of steps that count, without saves, over all time
since the first start, the queue included.

Left out: hangs, budgets and waits of repeated failures, a job that grows or shrinks, a node that fails while it is a
spare one, and several jobs that contend for one storage.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from verl_slurm.loops.reach import reach

StrikeKind = Literal["notice", "crash", "lost_node"]
Schedule = Callable[[int], int]
"""The step of the next periodic save after one at (or a start from) this step; at most the last step."""
# A run that has used up this many times the time of its steps is given up: it does not get anywhere.
_FIRST_LIMIT = 20.0
# Or has been struck so often: its simulation would take seconds.
_MOST_STRIKES = 20_000


class Dice(Protocol):
    """Random numbers; `random.Random` is one."""

    def random(self) -> float: ...

    def expovariate(self, lambd: float, /) -> float: ...

    def choice(self, seq: Sequence[float], /) -> float: ...


class RunModel(msgspec.Struct, frozen=True, kw_only=True):
    """All that a simulation knows of a run. Seconds, unless a name says otherwise."""

    steps: int
    step_s: float
    warm_up_s: float = 0.0
    """By which the first step of a start is longer."""
    sampling_share: float = 0.0
    replay_cost: float = 1.0
    save_s: float = 0.0
    durable_s: float = 0.0
    local_durable_s: float | None = None
    """The same on the nodes' own disks; None: the run has no second copies."""
    emergency_s: float = 0.0
    """From the warning to a verified save; of a guest, from the end of its step."""
    at_step_end: bool = False
    """A guest: it saves at the end of a step alone."""
    keeps_step_before: bool = False
    """And if that is too far, the end of the step before (verl's PPO)."""
    warning_s: float = 0.0
    """Of a preemption."""
    margin_s: float = 0.0
    limit_s: float = math.inf
    """Of one attempt."""
    lead_s: float = 0.0
    """The warning of that limit."""
    leave_s: float = 0.0
    """From the end of the save to the end of the attempt."""
    queue_s: tuple[float, ...] = (0.0,)
    """Waits, of which each is as likely."""
    first_start_s: float = 0.0
    start_s: float = 0.0
    """From the start of an attempt to the first safe point."""
    in_place_s: float = 0.0
    """From a crash to the first safe point, in the same attempt."""
    standby_s: float = 0.0
    """The same with ranks that stand by, after `standby_after_s` of training."""
    standby_after_s: float = math.inf
    spare_s: float = 0.0
    """From the loss of a node to the first safe point with a spare one."""
    lost_node_s: float = 0.0
    """From the loss of a node that nothing replaces to the end of the attempt."""
    finish_s: float = 0.0
    """From the last step to the end of the run."""
    nodes: int = 1
    spare_nodes: int = 0
    same_nodes: float = 0.0
    """How likely a requeued job gets the nodes that hold its second copies."""
    notices_per_s: float = 0.0
    crashes_per_s: float = 0.0
    losses_per_node_s: float = 0.0


class Strike(NamedTuple):
    """An interruption. `at`: allocated seconds since the first start; `position`: steps done when it comes, instead
    of `at`, if the run is not beyond them.
    """

    kind: StrikeKind
    at: float
    warning_s: float = 0.0
    position: float | None = None


NEVER = Strike("crash", math.inf)
Strikes = Callable[[float, float], Strike]
"""(when a life begins, when its ranks train) -> the strike that ends it."""


class Spent(msgspec.Struct, kw_only=True):
    """Where the allocated seconds went."""

    step: float = 0.0
    """Steps that count."""
    save: float = 0.0
    """Training time that their saves took."""
    part: float = 0.0
    """First parts of steps that were interrupted, and went on from there."""
    again: float = 0.0
    """Work that was lost: it was done again."""
    leave: float = 0.0
    """From a sign that ends an attempt to its end, the emergency save included."""
    start: float = 0.0
    """From a start, or from a crash, to the first safe point."""
    finish: float = 0.0

    @property
    def total(self) -> float:
        return math.fsum(msgspec.structs.astuple(self))


class SimulatedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one simulated run came out."""

    spent: Spent
    clock_s: float
    """The allocated time by the simulation's clock: the sum of `spent`."""
    queued_s: float
    finished: bool
    strikes: dict[str, int]
    unsaved: int
    """Notices without a save in time."""
    steps_again: float

    @property
    def allocated_s(self) -> float:
        return self.spent.total

    @property
    def wall_s(self) -> float:
        """From the first start to the end."""
        return self.allocated_s + self.queued_s

    @property
    def goodput(self) -> float:
        """0 to 1, as the journal counts it."""
        return (self.spent.step + self.spent.save) / self.allocated_s if self.allocated_s else 0.0

    @property
    def ettr(self) -> float:
        """0 to 1."""
        return self.spent.step / self.wall_s if self.wall_s else 0.0


def random_strikes(model: RunModel, dice: Dice) -> Strikes:
    """Strikes without memory, at the rates of the model."""
    rates: tuple[tuple[StrikeKind, float], ...] = (
        ("notice", model.notices_per_s),
        ("crash", model.crashes_per_s),
        ("lost_node", model.losses_per_node_s * model.nodes),
    )
    total = sum(rate for _, rate in rates)
    # At moments of the allocated time that are the dice's alone: two simulations with equal dice meet the
    # same strikes, and the difference between two ways to run is not drowned in that between two fates.
    strike = Strike("crash", 0.0)

    def next_strike(begins: float, trains: float) -> Strike:
        nonlocal strike
        while total > 0.0 and strike.at <= begins:
            at, pick = strike.at + dice.expovariate(total), dice.random() * total
            kind: StrikeKind = "lost_node"
            for each, rate in rates:
                if pick < rate:
                    kind = each
                    break
                pick -= rate
            strike = Strike(kind, at, model.warning_s)
        return strike if total > 0.0 else NEVER

    return next_strike


def simulate(model: RunModel, schedule: Schedule, strikes: Strikes, dice: Dice) -> SimulatedOutcome:
    """Simulates one run; `dice` draws queue waits, which node is lost, and whether nodes come back."""
    return _Run(model, schedule, strikes, dice).to_the_end()


class _Run:
    def __init__(self, model: RunModel, schedule: Schedule, strikes: Strikes, dice: Dice) -> None:
        self._model, self._schedule, self._strikes, self._dice = model, schedule, strikes, dice
        self._spent = Spent()
        self._now = self._queued = 0.0
        self._counts: dict[str, int] = {}
        self._unsaved, self._steps_again = 0, 0.0
        self._step, self._fraction = 0, 0.0
        self._sampled = (0, 0.0)
        """The farthest position ever: rollouts before it are in the ledger."""
        self._durable = self._local = (0, 0.0)
        self._pending: tuple[tuple[int, float], float] | None = None
        """The save that is being written: its position, and its beginning."""
        self._last_save = 0
        # Steps and saves since the newest durable position, up to the save that is being written and after it: a
        # strike turns them into work that is done again.
        self._before, self._after = [0.0, 0.0], [0.0, 0.0]
        self._unfinished = 0.0
        """Seconds of the running step in this life."""
        self._spares = model.spare_nodes

    def to_the_end(self) -> SimulatedOutcome:
        model = self._model
        attempt_began, start_s = 0.0, model.first_start_s
        give_up = _FIRST_LIMIT * (model.steps * model.step_s + model.first_start_s + 1.0)
        while True:
            strike = self._life(start_s, attempt_began + model.limit_s - model.lead_s)
            if strike is None:
                self._forget_pending(math.inf)
                self._spend("finish", model.finish_s)
                return self._outcome(finished=True)
            self._counts[strike.kind] = self._counts.get(strike.kind, 0) + 1
            trained_s = max(self._now - self._trains, 0.0)
            self._forget_pending(self._now)
            restart_s = self._struck(strike, trained_s)
            if restart_s is None:
                self._queued += self._dice.choice(model.queue_s)
                attempt_began, restart_s, self._spares = self._now, model.start_s, model.spare_nodes
            start_s = restart_s
            if self._now > give_up or sum(self._counts.values()) > _MOST_STRIKES:
                return self._outcome(finished=False)

    def _life(self, start_s: float, limit: float) -> Strike | None:
        """One start of the ranks; returns the strike that ends it, or None where all steps are done."""
        begins, self._trains = self._now, self._now + start_s
        self._unfinished, self._last_save = 0.0, self._step
        strike = self._strikes(begins, self._trains)
        # One that comes at a step, and one that comes by the clock: whichever is first.
        ahead = strike.position is not None and strike.position > self._step + self._fraction
        at_step, by_clock = (strike, NEVER) if ahead else (NEVER, strike)
        if limit < by_clock.at:
            by_clock = Strike("notice", limit, self._model.lead_s)
        if not self._wait("start", start_s, by_clock.at):
            return by_clock
        warm = self._model.warm_up_s
        while True:
            until = self._schedule(self._last_save)
            if (struck := self._work(until, by_clock, at_step, warm)) is not None:
                return struck
            warm = 0.0
            if self._step >= self._model.steps:
                return None
            if not self._save(by_clock.at):
                return by_clock

    def _work(self, until: int, by_clock: Strike, at_step: Strike, warm: float) -> Strike | None:
        """Works up to the end of step `until`; returns the strike that comes on the way."""
        while self._step < until:
            share = self._replayed(self._step)
            # One by one where steps differ: the first of a start, and the one at the ledger's end.
            if warm or self._fraction or self._step == self._sampled[0]:
                count = 1
            elif self._step < self._sampled[0]:
                count = min(until, self._sampled[0]) - self._step
            else:
                count = until - self._step
            whole, begun = self._time(1.0, share), self._time(self._fraction, share)
            seconds, strike = count * whole - begun + warm, by_clock
            if at_step.position is not None and at_step.position < self._step + count:
                steps, fraction = divmod(at_step.position - self._step, 1.0)
                at = self._now + warm + steps * whole + self._time(fraction, share) - begun
                strike = at_step._replace(at=at) if at < by_clock.at else by_clock
            if self._now + seconds > strike.at:
                self._stop_within(strike.at - self._now, count, whole, begun, share, warm)
                return strike
            self._now += seconds
            self._after[0] += seconds
            self._step, self._fraction, warm = self._step + count, 0.0, 0.0
        return None

    def _stop_within(
        self, seconds: float, count: int, whole: float, begun: float, share: float, warm: float
    ) -> None:
        """Stops `seconds` from now, within `count` steps that take `whole` each, of which `begun` are done."""
        done = begun + max(seconds - warm, 0.0)
        steps = min(int(done / whole), count - 1) if whole > 0.0 else 0
        self._now += seconds
        self._unfinished = done - steps * whole if steps else seconds
        self._after[0] += seconds - self._unfinished
        self._step += steps
        self._fraction = self._fraction_at(done - steps * whole, share)

    def _save(self, strike_at: float) -> bool:
        """Makes the periodic save that is due; False: struck while training waited for it."""
        model = self._model
        # There is one arena: a save waits until the one before it is written.
        waits = max(self._pending[1] + model.durable_s - self._now, 0.0) if self._pending else 0.0
        if not self._wait_in_training(waits, strike_at):
            return False
        # Not by the clock: a sum of floats may end a hair before the time that was waited for.
        self._forget_pending(math.inf)
        self._before, self._after = self._after, [0.0, 0.0]
        self._pending, self._last_save = ((self._step, 0.0), self._now), self._step
        if not self._wait_in_training(model.save_s, strike_at):
            return False
        # Where training waits for the whole save, it is durable when training goes on.
        self._forget_pending(self._now)
        return True

    def _struck(self, strike: Strike, trained_s: float) -> float | None:
        """Returns the seconds of a restart in place, or None: the job left its nodes."""
        model, training = self._model, self._now >= self._trains
        if (self._step, self._fraction) > self._sampled:
            self._sampled = (self._step, self._fraction)
        match strike.kind:
            case "notice":
                kept = training and self._emergency(strike.warning_s - model.margin_s)
                if not kept:
                    self._unsaved += training
                    self._go_back(self._durable)
                self._spend("leave", model.leave_s)
                return None
            case "crash":
                self._go_back(max(self._durable, self._local))
                return model.standby_s if trained_s >= model.standby_after_s else model.in_place_s
            case "lost_node":
                # The first node runs the batch script; and a disk that is gone with its node has no copy.
                first = self._dice.random() * model.nodes < 1.0
                self._go_back(self._durable)
                if self._spares and not first:
                    self._spares -= 1
                    return model.spare_s
                self._spend("leave", model.lost_node_s)
                return None

    def _emergency(self, left_s: float) -> bool:
        """Saves before the end; returns whether the next attempt goes on from here."""
        model = self._model
        waits = max(self._pending[1] + model.durable_s - self._now, 0.0) if self._pending else 0.0
        if model.at_step_end:
            done = self._time(self._fraction, self._replayed(self._step))
            rest = self._time(1.0, self._replayed(self._step)) - done
            # The decision of the session itself; and what then comes of it.
            may = reach(
                seconds_left=left_s, running_s=done, steps_s=[model.step_s], save_s=model.emergency_s
            ).ok
            if not may and model.keeps_step_before and waits + model.emergency_s <= left_s:
                self._spend("leave", waits + model.emergency_s)
                self._spent.again += self._unfinished
                self._steps_again += self._fraction
                self._fraction = self._unfinished = 0.0
                self._go_on_from_here()
                return True
            if not may or max(waits, rest) + model.emergency_s > left_s:
                self._spend("leave", max(left_s, 0.0) if may else 0.0)
                return False
            self._now += rest
            self._after[0] += self._unfinished + rest
            self._step, self._fraction, self._unfinished = self._step + 1, 0.0, 0.0
            self._sampled = max(self._sampled, (self._step, 0.0))
            waits = max(waits - rest, 0.0)
        needed = waits + model.emergency_s
        if needed > left_s:
            self._spend("leave", max(left_s, 0.0))
            # A copy on the nodes' disks serves the next attempt that gets these nodes.
            local = model.local_durable_s
            if local is None or local > left_s or self._dice.random() >= model.same_nodes:
                return False
        else:
            self._spend("leave", needed)
        self._go_on_from_here()
        return True

    def _go_on_from_here(self) -> None:
        self._pending = None
        self._keep(self._before)
        self._keep(self._after)
        self._spent.part += self._unfinished
        self._unfinished = 0.0
        self._durable = self._local = (self._step, self._fraction)

    def _go_back(self, to: tuple[int, float]) -> None:
        """Goes on from `to`, a durable position. The work since then is lost."""
        reached = self._step + self._fraction
        if self._pending is not None and to == self._pending[0]:
            self._keep(self._before)
            self._durable = to
        self._spent.again += sum(self._before) + sum(self._after) + self._unfinished
        self._before, self._after, self._unfinished = [0.0, 0.0], [0.0, 0.0], 0.0
        self._pending, self._local = None, self._durable
        self._steps_again += reached - (to[0] + to[1])
        self._step, self._fraction = to

    def _forget_pending(self, now: float) -> None:
        """The save that was being written is durable by now, or not yet."""
        if self._pending is None:
            return
        position, began = self._pending
        local = self._model.local_durable_s
        if local is not None and began + local <= now:
            self._local = position
        if began + self._model.durable_s <= now:
            self._durable, self._pending = position, None
            self._local = max(self._local, position)
            self._keep(self._before)

    def _keep(self, work: list[float]) -> None:
        self._spent.step += work[0]
        self._spent.save += work[1]
        work[:] = [0.0, 0.0]

    def _wait(self, label: Literal["start"], seconds: float, strike_at: float) -> bool:
        waited = min(seconds, max(strike_at - self._now, 0.0))
        self._spend(label, waited)
        return self._now < strike_at

    def _wait_in_training(self, seconds: float, strike_at: float) -> bool:
        waited = min(seconds, max(strike_at - self._now, 0.0))
        self._after[1] += waited
        self._now += waited
        return self._now < strike_at

    def _spend(self, label: Literal["leave", "start", "finish"], seconds: float) -> None:
        setattr(self._spent, label, getattr(self._spent, label) + seconds)
        self._now += seconds

    def _replayed(self, step: int) -> float:
        """The fraction of a step that the ledger brings back."""
        share = self._model.sampling_share
        farthest, fraction = self._sampled
        return share if step < farthest else min(fraction, share) if step == farthest else 0.0

    def _time(self, fraction: float, replayed: float) -> float:
        """Seconds from the beginning of a step to `fraction` of it."""
        again = min(fraction, replayed)
        return self._model.step_s * (fraction - again * (1.0 - self._model.replay_cost))

    def _fraction_at(self, seconds: float, replayed: float) -> float:
        """The inverse of `_time`."""
        steps, cost = seconds / self._model.step_s, self._model.replay_cost
        if steps < replayed * cost:
            return steps / cost
        return min(steps + replayed * (1.0 - cost), 1.0)

    def _outcome(self, *, finished: bool) -> SimulatedOutcome:
        self._keep(self._before)
        self._keep(self._after)
        return SimulatedOutcome(
            spent=self._spent,
            clock_s=self._now,
            queued_s=self._queued,
            finished=finished,
            strikes=self._counts,
            unsaved=self._unsaved,
            steps_again=self._steps_again,
        )
