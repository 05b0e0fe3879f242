"""The policy against everything that may happen to a lead, in any order: what holds whatever comes.

The machine stands for `effects`: each action that takes time is owed an answer, which comes at any later moment.
Beside them come signals, messages of ranks and failures. What a lead has to keep is checked after each event.
"""

from typing import Any, get_args

from hypothesis import assume, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from verl_slurm_daemon.decide import actions as act, inputs
from verl_slurm_daemon.decide.lead_model import Limits, Model, State
from verl_slurm_daemon.decide.policy import decide

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.journal.causes import CauseKind
from verl_slurm.wire import messages as msg

RANKS = 2
NODES = st.sampled_from(["", "n1", "n2"])
SECONDS = st.sampled_from([None, 5.0, 100.0])


class Policy(RuleBasedStateMachine):
    """A lead whose scheduler, ranks and disks answer when they like, and what they like."""

    def __init__(self) -> None:
        super().__init__()
        limits = Limits(crash_budget=1, backoff_s=1.0, no_progress_limit=3, node_budget=1, spare_nodes=1)
        self.model = Model(limits)
        self.owed: list[str | act.Verify] = []
        """What effects have yet to answer."""
        self.step = False
        """Ranks, or a start of them, are there: their end is to come."""
        self.deadline = False
        """A timer runs out before the job ends."""
        self.done: list[act.Action] = []
        self.is_cancelled = self.is_verified = self.is_done = False
        self.asked_before_cancel = False

    # ---- effects

    def feed(self, event: inputs.Input) -> None:
        if self.model.state is State.ENDED:
            return  # the lead's loop is over
        decision = decide(self.model, event)  # raises where a transition is not in the table
        self.model = decision.model
        for action in decision.actions:
            self.perform(action)

    def perform(self, action: act.Action) -> None:
        if not isinstance(action, act.Note):
            self.done.append(action)
        match action:
            case act.StartRanks(number):
                assert not self.step, "two restarts at once"
                assert number == sum(isinstance(one, act.StartRanks) for one in self.done)
                self.step = True
            case act.AskCause():
                assert "cause" not in self.owed, "two questions at once"
                self.owed.append("cause")
            case act.SaveRequest(seconds_left=seconds_left):
                ids = [one.request_id for one in self.done if isinstance(one, act.SaveRequest)]
                assert ids == sorted(set(ids)), "each request has a number of its own"
                self.deadline |= seconds_left is not None
                assert self.step, "nobody is there to save"
            case act.ArmDeadline():
                self.deadline = True
            case act.Verify():
                self.owed.append(action)
            case act.Pause():
                assert not self.step
                self.owed.append("pause")
            case act.AskRequeue():
                assert not self.is_cancelled, "a cancel is final"
                self.owed.append("requeue")
            case act.Exit(code):
                if code is ExitCode.OK:
                    assert self.is_done or (self.model.all_finished and not self.model.unverified)

    @invariant()
    def each_is_asked_once(self) -> None:
        assert sum(isinstance(one, act.AskRequeue) for one in self.done) <= 1
        assert sum(isinstance(one, act.Exit) for one in self.done) == (self.model.state is State.ENDED)

    @invariant()
    def it_is_never_stuck(self) -> None:
        if self.model.state in (State.STARTING, State.ENDED):
            return
        assert self.owed or self.step, f"{self.model.state}: nothing is to come"
        if self.model.state is State.SAVING and not self.deadline:
            assert self.model.saves_unbounded, "a hang in this save would hold the job to its time limit"

    @invariant()
    def a_cancel_stays_one(self) -> None:
        if self.is_cancelled and not self.asked_before_cancel:
            assert "requeue" not in self.owed

    # ---- the start

    @precondition(lambda self: self.model.state is State.STARTING)
    @rule(
        event=st.one_of(
            st.builds(
                inputs.Ready,
                world_size=st.just(RANKS),
                strangers=st.sampled_from([0, 130]),
                unfit=st.sampled_from([0, 24]),
                failed=st.sampled_from([0, 24]),
                trained=st.booleans(),
            ),
            st.builds(
                inputs.StartHindered,
                detail=st.just("storage"),
                before=st.sampled_from([0, 24]),
                exit_code=st.sampled_from([ExitCode.NO_ROOM, ExitCode.NO_SLURM]),
            ),
            st.just(inputs.NeedsPerson(3, "too few nodes")),
            st.just(inputs.Over(ExitCode.NO_PROGRESS, "3 starts")),
        )
    )
    def begins(self, event: inputs.Input) -> None:
        self.feed(event)

    @precondition(lambda self: self.model.state is State.LAUNCHING and not self.model.started)
    @rule(
        event=st.sampled_from(
            [
                inputs.StartHindered("storage"),
                inputs.StartHindered("no answer", exit_code=ExitCode.NO_SLURM),
                inputs.AllDone("step_000005", "all steps are done"),
                inputs.Over(ExitCode.CONFIG, "another configuration"),
            ]
        )
    )
    def a_restart_does_not_begin(self, event: inputs.Input) -> None:
        assume(self.step)
        self.step, self.is_done = False, self.is_done or isinstance(event, inputs.AllDone)
        self.feed(event)

    # ---- what effects answer

    # The first event is in the lead's queue before its loop begins: a signal may be ahead of it, no answer is.
    @precondition(lambda self: "cause" in self.owed and self.model.state is not State.STARTING)
    @rule(kind=st.sampled_from(get_args(CauseKind)), left=SECONDS)
    def slurm_says_why(self, kind: CauseKind, left: float | None) -> None:
        self.owed.remove("cause")
        if kind == "cancel" and self.model.state is not State.ENDED:
            self.asked_before_cancel = "requeue" in self.owed or self.model.requeue is not None
            self.is_cancelled = not self.asked_before_cancel
        self.feed(inputs.CauseKnown(kind, "as seen", left))

    @precondition(lambda self: self.step)
    @rule(code=st.sampled_from([0, 1]))
    def the_step_ends(self, code: int) -> None:
        self.step = False
        self.feed(inputs.RanksEnded(code))

    @precondition(lambda self: any(isinstance(one, act.Verify) for one in self.owed))
    @rule(good=st.booleans(), pruned=st.booleans(), unreadable=st.booleans())
    def a_save_is_read_back(self, good: bool, pruned: bool, unreadable: bool) -> None:
        verify = next(one for one in self.owed if isinstance(one, act.Verify))
        self.owed.remove(verify)
        bad = {} if good else {"pruned": pruned, "unreadable": unreadable and not pruned}
        self.feed(inputs.SaveReadBack(verify.name, good, "", **bad))

    @precondition(lambda self: "pause" in self.owed)
    @rule(stuck=st.sampled_from([0, 3]))
    def the_pause_is_over(self, stuck: int) -> None:
        self.owed.remove("pause")
        self.feed(inputs.BackoffOver(stuck, "no progress"))

    @precondition(lambda self: "requeue" in self.owed)
    @rule(code=st.sampled_from([ExitCode.REQUEUED, ExitCode.REQUEUE_FAILED, ExitCode.CANCELLED]))
    def slurm_answers_the_requeue(self, code: ExitCode) -> None:
        self.owed.remove("requeue")
        self.feed(inputs.RequeueAnswered(code, "as asked"))

    @precondition(lambda self: self.deadline)
    @rule()
    def the_deadline_comes(self) -> None:
        self.feed(inputs.SaveDeadline())
        assert self.model.state not in (State.SAVING, State.CHECKING)

    # ---- what comes by itself

    @rule(
        signal=st.sampled_from(["SIGUSR1", "SIGTERM", "TIMER"]),
        where=st.sampled_from(["lead", "node n1"]),
        again=st.booleans(),
    )
    def a_signal_arrives(self, signal: str, where: str, again: bool) -> None:
        self.feed(inputs.SignalArrived(signal, where, again))

    @precondition(lambda self: self.step)
    @rule(data=st.data(), rank=st.sampled_from(range(RANKS)))
    def a_rank_speaks(self, data: st.DataObject, rank: int) -> None:
        request = data.draw(st.sampled_from([0, self.model.request_id, self.model.request_id + 1]))
        words: list[Any] = [
            msg.RankStarted(rank=rank, pid=7),
            msg.RankStarted(rank=rank, pid=7, by_program=False),
            msg.Progress(rank=rank, step=3, phase="generate", index=1, safe_points=1, new_rollouts=request),
            msg.Finished(rank=rank, step=30),
            msg.SaveStarted(rank=rank, request_id=request, step=1, safe_point=0),
            msg.PartSaved(rank=rank, request_id=request),
            msg.SavedOnNodes(rank=0, request_id=request, name="step_000003", seconds=0.1, num_bytes=9),
            msg.RankSaved(rank=0, request_id=request, name="step_000003", seconds=0.1, num_bytes=9),
            msg.RankSaved(rank=0, request_id=request, name="s", seconds=0.1, num_bytes=9, on_shared=False),
            msg.RankSaveFailed(rank=rank, request_id=request, reason="no space"),
            msg.RankRefused(rank=rank, exit_code=int(ExitCode.DATA), reason="no such file"),
            msg.RankRefused(rank=rank, exit_code=int(ExitCode.DATA), reason="x", place="r.py:7", worked=True),
        ]
        self.feed(inputs.RankSaid(data.draw(st.sampled_from(words))))

    @precondition(lambda self: self.step)
    @rule(data=st.data(), node=NODES, restart=st.sampled_from([0, 1, 2]))
    def something_fails(self, data: st.DataObject, node: str, restart: int) -> None:
        failures: list[inputs.Input] = [
            inputs.NodeFailed(node, "killed"),
            inputs.NodeFailed(node, "gone", lost=True),
            inputs.NodeFailed("", "Slurm was away", environment=True),
            inputs.StrangerFound(node, "eve"),
            inputs.Hung(restart, node, "silent"),
            inputs.StartTimedOut(restart, 300.0, all_ranks=True),
            inputs.ServiceLost("service judge: gone"),
            inputs.LeaveNode(node or "n3", "bad_node", "GPUs"),
            inputs.LeaveNode(node or "n3", "reclaimed", "AWS", 100.0),
        ]
        self.feed(data.draw(st.sampled_from(failures)))

    @precondition(lambda self: self.model.state is not State.STARTING)
    @rule()
    def a_newer_attempt_takes_the_run(self) -> None:
        self.feed(inputs.RunLost("attempt 2 of job 8"))

    # ---- left to itself, it ends or trains

    def teardown(self) -> None:
        """From wherever it is: what is owed comes, ranks that are told to end do, and nothing else happens."""
        for _ in range(50):
            if self.model.state in (State.STARTING, State.ENDED):
                return
            told = isinstance(next((one for one in reversed(self.done) if self.step), None), act.TakeDown)
            if "requeue" in self.owed:
                self.slurm_answers_the_requeue(ExitCode.REQUEUED)
            elif any(isinstance(one, act.Verify) for one in self.owed):
                self.a_save_is_read_back(True, False, False)
            elif "cause" in self.owed:
                self.slurm_says_why("none", None)
            elif "pause" in self.owed:
                self.the_pause_is_over(0)
            elif self.deadline and self.model.state in (State.SAVING, State.CHECKING):
                self.the_deadline_comes()
            elif self.step and (told or self.model.failure or self.model.state is State.LEAVING):
                self.the_step_ends(1)
            elif self.step:  # it trains on, or a save that nothing presses is hung in
                if self.model.state is State.RUNNING or self.model.state is State.LAUNCHING:
                    return
                self.feed(inputs.Hung(self.model.restart, "n1", "silent"))
                if self.model.state in (State.SAVING, State.CHECKING):
                    self.the_step_ends(1)
        raise AssertionError(f"{self.model.state} after 50 answers")


TestPolicy = Policy.TestCase
TestPolicy.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
