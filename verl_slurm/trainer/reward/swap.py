"""Replaces the reward while the run goes on: between two steps, on all ranks at once, and recorded before it counts.

The order of a replacement, at the end of step k:

1. Rank 0 finds the request. It looks when the daemon hands on an operator's request (the signal that also
   asks for a save), at the start, and after the first step. Looking never blocks.
2. The state before the replacement is saved (trainer.loop).
3. The new reward is loaded beside the old one and scores the last responses, twice; a failure refuses it.
4. The necessary parts of the old one, and then the entry in RUN/rewards.json, become durable. This decides
   it.
5. Its scores of the last responses give the map to the old scale (`warm_start`), and step k is scored with it.

An interruption before 4 has changed nothing. One after 4 reaches step k again and does 5 with the same numbers, as the
last responses and their scores are part of the state.

A run that was set back replays its ledger. A request that is found meanwhile waits until that is done.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import cast

import msgspec
import torch
from torch import Tensor

from verl_slurm.base.errors import DataError, Fenced, VerlSlurmError
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.objective.warm_start import IDENTITY, matching
from verl_slurm.trainer.reporter import Reporter
from verl_slurm.trainer.reward.reward_files import Keep, digest_and_keep, write_light_snapshot
from verl_slurm.trainer.reward.scoring import Reward, build_reward
from verl_slurm.trainer.state.reward_state import RewardState
from verl_slurm.trainer.state.train_state import TrainState
from verl_slurm.wire.reward_plan import (
    RewardPlan,
    RewardRequest,
    RewardSwitch,
    read_reward_request,
    write_reward_plan,
)

_PATIENCE_S = 1.0
"""How long the end of a step waits for an earlier look: storage that is there has long answered."""
_NOT_KNOWN, _NO_WISH, _A_WISH = 0, 1, 2


class LiveReward:
    """The reward in force; itself a `Reward`."""

    def __init__(self, present: Reward) -> None:
        self.present = present

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> Tensor:
        return self.present(prompts, responses, answers)


class RewardSwap:
    """See the module. Runs on every rank.

    Args:
        plan: the run's record, the same on all ranks.
        keep: copies a model; None: no copies.
        counts: this rank tries a new reward for its replica, whose ranks all have the same responses.
    """

    def __init__(
        self,
        *,
        paths: RunPaths,
        attempt: int,
        ranks: Collective,
        reporter: Reporter,
        plan: RewardPlan,
        live: LiveReward,
        texts: Callable[[Batch], tuple[list[str], list[str], list[str]]],
        keep: Keep | None,
        device: torch.device | None = None,
        counts: bool = True,
        load: Callable[..., Reward] = build_reward,
    ) -> None:
        self._paths, self._attempt, self._ranks, self._reporter = paths, attempt, ranks, reporter
        self._plan, self._live, self._texts, self._keep = plan, live, texts, keep
        self._device, self._counts, self._load = device, counts, load
        self._thread: threading.Thread | None = None
        self._looking = self._again = False
        self._wish: RewardRequest | None = None
        self._first_step: int | None = None

    def look(self) -> None:
        """Starts a look for a request of another reward. All ranks call it at the same point."""
        # On every rank, so that all of them enter `due`'s collective until rank 0 has an answer.
        self._looking = True
        if self._ranks.rank != 0:
            return
        # What an earlier look has read may be older than the request that is looked for now.
        self._again = self._thread is not None and self._thread.is_alive()
        if not self._again:
            # In a thread: RUN may be on storage that does not answer, and the step must not wait for it.
            self._thread = threading.Thread(target=self._find, name="reward", daemon=True)
            self._thread.start()

    def due(self, state: TrainState, replays_until: int) -> RewardSwitch | RewardRequest | None:
        """Returns the replacement to make before the step at which `state` stands; the same on all ranks. Collective.

        Args:
            replays_until: the last step of which this rank has journaled rollouts.
        """
        step = state.position.step
        if state.position.phase != "step_end":
            return None
        self._look_unasked(step)
        # A run that was set back: the record decides at which step, and a new request waits until it is caught up.
        if state.reward.number < len(self._plan.switches):
            recorded = self._plan.switches[state.reward.number]
            return recorded if recorded.step == step else None
        if not self._looking:
            return None
        # The latest of all ranks' ledgers: replayed responses come from weights that the old reward has trained.
        known, until = self._ranks.max([self._answer(), replays_until])
        self._looking = known != _NO_WISH
        if known != _A_WISH or until >= step:
            return None
        self._looking = False
        # From rank 0's memory: the file may hold another request by now.
        return self._ranks.on_first(
            "reading the wish", lambda: cast(RewardRequest, self._wish), RewardRequest
        )

    def perform(self, due: RewardSwitch | RewardRequest, state: TrainState) -> None:
        """Replaces the reward, or reports why not. Collective.

        Raises:
            Fenced: another attempt owns the run.
            RanksFailed: a recorded replacement fails, or its recording is uncertain: the record counts.
        """
        # Decided in an earlier attempt, so a failure is a crash here and no refusal.
        if isinstance(due, RewardSwitch):
            new, scores = self._ranks.together(
                "loading the recorded reward", lambda: self._try(due.reward, due.digest, state.reward)
            )
            self._take(due, new, scores, state)
            return
        try:
            # By rank 0: the others load what it hashed, and refuse a source that differs on their node.
            digest = self._ranks.on_first(
                "looking at the new reward", lambda: digest_and_keep(self._paths, due.reward, self._keep), str
            )
            new, scores = self._ranks.together(
                "trying the new reward", lambda: self._try(due.reward, digest, state.reward)
            )
        except RanksFailed as error:
            self._say_refused(due, error, state)
            try:
                self._refuse(due, error)
            except RanksFailed as second:
                # Asked again at the next start, then; nothing was decided.
                self._reporter.complain(second.one_line())
            return
        # Made after the trial on all ranks: what cannot score must never be recorded.
        switch = RewardSwitch(
            request=due.number,
            step=state.position.step,
            reward=due.reward,
            digest=digest,
            warm_start_steps=due.warm_start_steps,
            replaced=state.reward.spec,
            recorded_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        try:
            self._record(switch, state.reward)
        except RanksFailed as error:
            if Fenced.__name__ in error.kinds:
                # The other ranks know the kind as a name alone. A fenced rank must not go on to write the refusal.
                raise Fenced("another attempt owns the run", found=error.found) from error
            self._refuse(due, error)  # it may be on disk all the same: what fails here is a crash
            self._say_refused(due, error, state)
            return
        # Behind the record: an interruption before it has changed nothing, one after it comes to this step again.
        self._take(switch, new, scores, state)

    # ---- the wish

    def _look_unasked(self, step: int) -> None:
        """Looks at the start, and once more after the first step."""
        # A request may be from before the daemon could hand it on.
        if self._first_step is None:
            self._first_step = step
            self.look()
        # -1: both looks are done.
        elif 0 <= self._first_step < step:
            self._first_step = -1
            self.look()

    def _find(self) -> None:
        try:
            wish = read_reward_request(self._paths)
        except (OSError, VerlSlurmError) as error:
            self._reporter.complain(f"no request for another reward can be read: {error}")
            wish = None
        # A request stays in its file when it is done; its number tells whether it was.
        self._wish = wish if wish is not None and wish.number > self._plan.handled else None

    def _answer(self) -> int:
        if self._thread is None:
            return _NOT_KNOWN  # not rank 0
        # Bounded: the others wait for this rank in the next collective.
        self._thread.join(timeout=_PATIENCE_S)
        if self._thread.is_alive():
            return _NOT_KNOWN
        if self._again:
            self.look()
            return _NOT_KNOWN
        return _NO_WISH if self._wish is None else _A_WISH

    # ---- the replacement

    def _try(self, reward: str, digest: str, state: RewardState) -> tuple[Reward, Tensor | None]:
        """Loads the reward; one rank of each replica scores the last responses with it, if there are any."""
        new = self._load(reward, device=self._device, digest=digest)
        if not state.cached:
            return new, None
        # A replica's ranks have the same responses, and a judge may cost money: one asks. 0 rows add nothing.
        if not self._counts:
            return new, torch.zeros(0)
        texts = self._texts(state.cached)
        scores = new(*texts)
        if scores.shape != (len(texts[0]),) or not bool(scores.isfinite().all()):
            raise DataError(
                "the new reward gives something that is no reward",
                where=reward,
                found=f"{tuple(scores.shape)}, {int((~scores.isfinite()).sum())} of them not finite",
                expected=f"{len(texts[0])} finite scores",
            )
        # Asked twice: a resume scores the same responses again, and has to get the same bits.
        if not torch.equal(scores, new(*texts)):
            raise DataError(
                "the new reward gives other scores for the same texts",
                where=reward,
                remedy="a reward must depend on the texts alone, or no resume is exact",
            )
        return new, scores

    def _record(self, switch: RewardSwitch, former: RewardState) -> None:
        plan = RewardPlan(
            handled=max(switch.request, self._plan.handled), switches=(*self._plan.switches, switch)
        )

        def write() -> None:
            require_attempt(self._paths, self._attempt)
            # What is about to be replaced first: once the plan is written, the next start takes the new reward.
            write_light_snapshot(self._paths, len(plan.switches), self._live.present, former)
            write_reward_plan(self._paths, plan)

        self._ranks.first_does("recording the new reward", write)
        self._plan = plan

    def _refuse(self, wish: RewardRequest, error: RanksFailed) -> None:
        plan = msgspec.structs.replace(self._plan, handled=wish.number, refused=error.one_line())

        def write() -> None:
            require_attempt(self._paths, self._attempt)
            write_reward_plan(self._paths, plan)

        self._ranks.first_does("recording the refusal", write)
        self._plan = plan

    def _take(self, switch: RewardSwitch, new: Reward, scores: Tensor | None, state: TrainState) -> None:
        former = state.reward
        full = None
        if switch.warm_start_steps and scores is not None:
            # The former scores as the training saw them, with the rest of an earlier warm start in them.
            full = matching(former.cached["scores"][: len(scores)], scores, self._ranks.sum)
        state.reward = RewardState(
            spec=switch.reward,
            digest=switch.digest,
            number=former.number + 1,
            since_step=switch.step,
            warm_steps=switch.warm_start_steps if full else 0,
            full=full or IDENTITY,
            # Kept until the step is done: a resume at this step makes the same map of the same scores.
            cached=former.cached,
        )
        self._live.present = new
        how = "no warm start"
        if full:
            how = f"warm start over {switch.warm_start_steps} steps from {full.scale:.4g} x score {full.offset:+.4g}"
        self._tell(f"{former.spec} -> {switch.reward} from step {switch.step + 1} on, {how}", loud=False)

    def _say_refused(self, wish: RewardRequest, error: RanksFailed, state: TrainState) -> None:
        self._tell(
            f"the reward stays {state.reward.spec}: {wish.reward} was refused: {error.one_line()}", loud=True
        )

    def _tell(self, text: str, *, loud: bool) -> None:
        self._reporter.notice(text, topic="reward", loud=loud)
