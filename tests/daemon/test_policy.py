"""The table of causes, row by row, as the pure function sees it."""

from pathlib import Path

import msgspec
import pytest
from verl_slurm_daemon.decide import actions as act, inputs
from verl_slurm_daemon.decide.lead_model import FailureKind, Intent, Limits, Model, State, suspects
from verl_slurm_daemon.decide.policy import decide

from tests.journals import make_event
from verl_slurm.base.errors import NOT_SET_UP
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import require_attempt, take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.causes import CauseKind
from verl_slurm.journal.events import Crash, Held, kind_of
from verl_slurm.wire import messages as msg

LIMITS = Limits(crash_budget=2, backoff_s=1.0, no_progress_limit=3)


def progress(rank: int = 0, step: int = 3) -> inputs.RankSaid:
    return inputs.RankSaid(
        msg.Progress(rank=rank, step=step, phase="generate", index=1, safe_points=1, new_rollouts=16)
    )


SAVED = "step_000003_sp0002"


def saved(request_id: int) -> inputs.RankSaid:
    return inputs.RankSaid(msg.RankSaved(rank=0, request_id=request_id, name=SAVED, seconds=0.1, num_bytes=9))


def on_nodes(request_id: int) -> inputs.RankSaid:
    return inputs.RankSaid(
        msg.SavedOnNodes(rank=0, request_id=request_id, name=SAVED, seconds=0.1, num_bytes=9)
    )


def came(rank: int) -> inputs.RankSaid:
    return inputs.RankSaid(msg.SaveStarted(rank=rank, request_id=1, step=1, safe_point=0))


def wrote(rank: int, request_id: int = 1) -> inputs.RankSaid:
    return inputs.RankSaid(msg.PartSaved(rank=rank, request_id=request_id))


def cause(kind: CauseKind, left: float | None = 25.0) -> inputs.CauseKnown:
    return inputs.CauseKnown(kind, "as seen", left)


class Story:
    """Feeds events one after the other and keeps what was done."""

    def __init__(self, *events: inputs.Input) -> None:
        self.model, self.actions = Model(LIMITS), []
        for event in events:
            self.then(event)

    def then(self, event: inputs.Input) -> list[act.Action]:
        decision = decide(self.model, event)
        self.model = decision.model
        self.actions += decision.actions
        return list(decision.actions)


def training() -> Story:
    return Story(inputs.Ready(2), progress())


def kinds(actions: list[act.Action]) -> list[type]:
    return [type(a) for a in actions if not isinstance(a, act.Note)]


def noted(actions: list[act.Action]) -> list[str]:
    return [kind_of(action.event) for action in actions if isinstance(action, act.Note)]


def test_a_signal_alone_asks_slurm_and_one_to_the_lead_meanwhile_is_asked_about_next() -> None:
    story = Story(inputs.Ready(2))
    assert (story.model.state, kinds(story.actions)) == (State.LAUNCHING, [act.StartRanks])
    story.then(progress())
    assert kinds(story.then(inputs.SignalArrived("SIGUSR1", "lead"))) == [act.AskCause]
    assert story.model.state is State.RUNNING
    assert story.then(inputs.SignalArrived("SIGTERM", "node n1")) == []
    assert story.then(inputs.SignalArrived("SIGTERM", "lead")) == []
    assert story.then(cause("operator", None))[-1] == act.AskCause("SIGTERM to lead")
    assert kinds(story.then(cause("preemption"))) == [act.SaveRequest]


def test_a_signal_that_slurm_does_not_explain_is_asked_about_again_and_saved_for_once() -> None:
    again = inputs.SignalArrived("SIGUSR1", "lead", again=True)
    asked = [act.AskCause("SIGUSR1 to lead")]
    story = training()
    assert story.then(inputs.SignalArrived("SIGUSR1", "lead")) == asked
    assert story.then(again) == [], "the question under way answers it"
    assert story.then(cause("unknown", None))[-1] == act.SaveRequest(request_id=1, stop=False)
    for kind in ("unknown", "operator"):
        assert story.then(again) == asked
        assert story.then(cause(kind, None)) == []
    assert story.then(inputs.SignalArrived("SIGUSR1", "lead")) == asked
    assert kinds(story.then(cause("unknown", None))) == [act.SaveRequest], "of a new signal"
    assert story.then(again) == asked
    assert story.then(cause("preemption"))[-1] == act.SaveRequest(request_id=3, stop=True, seconds_left=25.0)


@pytest.mark.parametrize(
    ("kind", "done", "code"),
    [
        ("operator", [act.SaveRequest], None),
        ("unknown", [act.SaveRequest], None),
        ("suspended", [], None),
        ("none", [], None),
        ("cancel", [act.SaveRequest], ExitCode.CANCELLED),
        ("requeued", [act.SaveRequest], ExitCode.REQUEUED),
        ("node_lost", [act.TakeDown], ExitCode.REQUEUED),  # Slurm requeues it
        (
            "failed",
            [act.AskRequeue, act.TakeDown],
            ExitCode.REQUEUED,
        ),  # a rank's node is gone: none could save
    ],
)
def test_each_cause_has_its_own_end(kind: CauseKind, done: list[type], code: ExitCode | None) -> None:
    story = training()
    assert kinds(story.then(cause(kind))) == done
    if code is None:
        assert story.model.state is State.RUNNING
        return
    if act.SaveRequest in done:
        story.then(saved(1))
        story.then(inputs.SaveReadBack(SAVED, True, ""))
    story.then(inputs.RanksEnded(1))
    if act.AskRequeue in done:
        story.then(inputs.RequeueAnswered(ExitCode.REQUEUED, "job 8 follows this one"))
    end = story.actions[-1]
    assert isinstance(end, act.Exit)
    assert end.code is code
    assert kinds(story.actions).count(act.AskRequeue) == done.count(act.AskRequeue)


@pytest.mark.parametrize("before", ["the ranks are up", "the next restart"])
def test_a_preemption_without_ranks_requeues_at_once(before: str) -> None:
    story = Story(inputs.Ready(2))
    if before == "the next restart":
        story.then(progress())
        story.then(inputs.RanksEnded(1))
    assert kinds(story.then(cause("preemption")))[0] is act.AskRequeue


@pytest.mark.parametrize("kind", ["preemption", "time_limit"])
def test_a_preemption_saves_verifies_requeues_and_exits_when_all_is_gone(kind: CauseKind) -> None:
    story = training()
    assert story.then(cause(kind))[-1] == act.SaveRequest(request_id=1, stop=True, seconds_left=25.0)
    assert kinds(story.then(saved(1))) == [act.Verify]
    assert story.then(inputs.RanksEnded(0)) == []
    assert kinds(story.then(inputs.SaveReadBack(SAVED, True, ""))) == [act.AskRequeue]
    last = story.then(inputs.RequeueAnswered(ExitCode.REQUEUED, "starts in 10 s"))
    assert last == [act.Exit(ExitCode.REQUEUED, "starts in 10 s")]


def wished() -> Story:
    """A requeue was asked for, and the checkpoint that it waits for is there."""
    story = training()
    story.then(cause("operator_requeue", None))
    story.then(saved(1))
    assert story.then(inputs.SaveReadBack(SAVED, True, ""))[-1] == act.SaveRequest(request_id=2, stop=True)
    return story


def test_a_requeue_that_an_operator_wishes_stops_the_ranks_once_a_checkpoint_verifies() -> None:
    story = training()
    assert story.then(cause("operator_requeue", None))[-1] == act.SaveRequest(request_id=1, stop=False)
    assert story.then(cause("operator_requeue", None)) == [], "asked twice"
    assert story.model.state is State.RUNNING
    story = wished()
    assert kinds(story.then(saved(2))) == [act.Verify]
    assert kinds(story.then(inputs.SaveReadBack(SAVED, True, ""))) == [act.AskRequeue, act.TakeDown]
    hurried = training()
    hurried.then(cause("operator_requeue", None))
    assert hurried.then(cause("preemption", 20.0))[-1] == act.SaveRequest(
        request_id=2, stop=True, seconds_left=20.0
    )


def test_a_wished_requeue_is_answered_by_a_later_save_and_done_after_a_crash() -> None:
    story = training()
    story.then(cause("operator_requeue", None))
    story.then(cause("operator", None))  # its request replaces the first one on the ranks' page
    story.then(saved(2))
    assert story.then(inputs.SaveReadBack(SAVED, True, ""))[-1] == act.SaveRequest(request_id=3, stop=True)
    crashed = training()
    crashed.then(cause("operator_requeue", None))
    crashed.then(inputs.NodeFailed("n1", "killed"))
    assert kinds(crashed.then(inputs.RanksEnded(1))) == [act.AskRequeue]


def test_a_lost_service_is_a_crash_before_the_ranks_run_and_afterwards_a_save_without_a_deadline() -> None:
    story = Story(inputs.Ready(1))
    assert kinds(story.then(inputs.ServiceLost("service judge: no model here"))) == [act.TakeDown]
    crash, pause = story.then(inputs.RanksEnded(0))
    assert isinstance(crash, act.Note)
    assert crash.event.detail == "service judge: no model here"  # type: ignore[attr-defined]
    assert isinstance(pause, act.Pause)
    story = training()
    note, request = story.then(inputs.ServiceLost("service judge: gone"))
    assert note == act.Note(make_event("cause", cause="service", evidence="service judge: gone"))
    assert request == act.SaveRequest(request_id=1, stop=True)
    assert not story.then(inputs.ServiceLost("service sandbox: gone"))
    # A rank waits for the service in its step, and never comes to the save.
    hung = inputs.Hung(story.model.restart, "n1", "silent")
    assert kinds(story.then(hung)) == [act.AskRequeue, act.TakeDown]


def test_a_wished_requeue_whose_save_fails_leaves_the_ranks_at_work_and_says_so() -> None:
    for answer in (
        inputs.RankSaid(msg.RankSaveFailed(rank=0, request_id=1, reason="no space")),
        inputs.SaveReadBack(SAVED, False, "no space"),
    ):
        story = training()
        story.then(cause("operator_requeue", None))
        if isinstance(answer, inputs.SaveReadBack):
            story.then(saved(1))
        note = story.then(answer)[-1]
        assert isinstance(note, act.Note)
        assert "not requeued: the save before it failed" in note.event.text  # type: ignore[attr-defined]
        assert (story.model.state, story.model.intent) == (State.RUNNING, None)
        assert story.then(cause("operator_requeue", None))[-1] == act.SaveRequest(request_id=2, stop=False)


def test_a_wished_requeue_goes_on_without_a_save_where_none_can_succeed_in_this_attempt(
    tmp_path: Path,
) -> None:
    paths = RunPaths(tmp_path)
    paths.run_yaml.touch()
    take_attempt(paths, job_id="1", restart=0)
    with pytest.raises(FileNotFoundError, match="verl-slurm requeue") as refused:
        require_attempt(paths, 2)  # RUN is a former copy of itself
    story = training()
    story.then(cause("operator_requeue", None))
    told = story.then(inputs.RankSaid(msg.RankSaveFailed(rank=0, request_id=1, reason=str(refused.value))))
    assert any(isinstance(one, act.AskRequeue) for one in told)
    assert (story.model.state, story.model.intent) == (State.LEAVING, Intent.REQUEUE)
    assert any(isinstance(one, act.Note) and "without a save" in str(one.event) for one in told)


def test_a_rank_that_hangs_in_the_save_of_a_wished_requeue_does_not_hold_the_job_to_its_limit() -> None:
    story = wished()
    assert not story.then(inputs.Hung(story.model.restart - 1, "n1", "of the restart before"))
    assert kinds(story.then(inputs.Hung(story.model.restart, "n1", "silent"))) == [
        act.AskRequeue,
        act.TakeDown,
    ]
    bounded = wished()
    assert bounded.model.saves_unbounded  # so the lead goes on to look how near its limit is
    bounded.then(cause("preemption", 20.0))
    assert not bounded.model.saves_unbounded
    assert not bounded.then(inputs.Hung(bounded.model.restart, "n1", "silent"))


@pytest.mark.scenario("P03")
def test_at_the_deadline_the_ranks_that_the_save_waits_for_are_named() -> None:
    def reason(*said: inputs.Input) -> str:
        story = training()
        story.then(cause("preemption"))
        for event in said:
            story.then(event)
        (note,) = (a for a in story.then(inputs.SaveDeadline()) if isinstance(a, act.Note))
        return note.event.reason.partition(": ")[2]

    assert reason() == "rank 0, 1 has not come to it"
    assert reason(came(0)) == "rank 1 has not come to it"
    assert reason(came(0), came(1), wrote(1)) == "rank 0 has not written its part"
    assert reason(came(0), came(1), wrote(1, request_id=0)) == "rank 0, 1 has not written its part"
    assert reason(came(0), came(1), wrote(0), wrote(1)) == ""


@pytest.mark.scenario("P08")
def test_an_answer_that_comes_late_or_that_nobody_asked_for_is_not_waited_for() -> None:
    story = training()
    story.then(cause("preemption"))
    assert kinds(story.then(saved(2))) == []
    assert kinds(story.then(saved(1))) == [act.Verify]
    other = msg.RankSaved(rank=0, request_id=0, name="step_000001", seconds=0.1, num_bytes=9)
    assert kinds(story.then(inputs.RankSaid(other))) == [act.Verify]
    assert act.AskRequeue() in story.then(inputs.SaveReadBack(SAVED, True, ""))


@pytest.mark.parametrize(
    ("before", "strikes", "told"),
    [
        ((), inputs.SaveDeadline(), ["degraded"]),
        ((), inputs.RankSaid(msg.RankSaveFailed(rank=1, request_id=1, reason="no space")), ["save_failed"]),
        ((), inputs.RanksEnded(1), ["degraded"]),  # the ranks died in the save
        ((on_nodes(7),), inputs.SaveDeadline(), ["degraded"]),  # of another request
        ((on_nodes(1),), inputs.SaveDeadline(), ["saved", "one_copy"]),
        ((on_nodes(1),), inputs.RanksEnded(137), ["saved", "one_copy"]),
        ((on_nodes(1), saved(1)), inputs.SaveReadBack(SAVED, True, ""), ["verified"]),
        ((on_nodes(1), saved(1)), inputs.SaveDeadline(), ["one_copy"]),
        ((saved(1),), inputs.SaveReadBack(SAVED, False, "actor/x: sha256"), ["corrupt"]),
    ],
)
def test_whatever_becomes_of_the_save_the_job_is_requeued_and_the_journal_says_what_is_left(
    before: tuple[inputs.Input, ...], strikes: inputs.Input, told: list[str]
) -> None:
    story = training()
    story.then(cause("preemption"))
    for event in before:
        story.then(event)
    actions = story.then(strikes)
    assert noted(actions) == told
    assert act.AskRequeue() in actions
    if told == ["saved", "one_copy"]:
        assert actions[0].event.on_shared is False  # type: ignore[union-attr]


def test_a_periodic_save_is_no_answer_to_the_emergency_one_and_no_corrupt_one_if_it_was_pruned() -> None:
    story = training()
    message = msg.RankSaved(
        rank=0, request_id=0, name=SAVED, seconds=0.1, num_bytes=9, reason="a multiple of 3"
    )
    note, _ = story.then(inputs.RankSaid(message))
    assert isinstance(note, act.Note)
    assert note.event.reason == "a multiple of 3"  # type: ignore[attr-defined]
    assert noted(story.then(inputs.SaveReadBack(SAVED, False, "removed", pruned=True))) == ["pruned"]
    assert story.model.unverified == ""
    for loud, event in ((False, "notice"), (True, "warning")):
        said = inputs.RankSaid(msg.RankNotice(rank=0, topic="storage", text="SLOW", loud=loud))
        assert story.then(said) == [act.Note(make_event(event, topic="storage", text="SLOW"))]
    story.then(cause("preemption"))
    story.then(saved(1))
    story.then(inputs.SaveReadBack("step_000002", True, ""))
    assert story.model.state is State.CHECKING


def test_the_earlier_of_two_ends_is_the_deadline_and_nodes_that_go_are_avoided() -> None:
    story = training()
    (note, request) = story.then(inputs.LeaveNode("node2", "reclaimed", "AWS will terminate it", 110.0))
    assert isinstance(note, act.Note)
    assert note.event == make_event(
        "cause", cause="reclaimed", evidence="node node2: AWS will terminate it", seconds_left=110.0
    )
    assert request == act.SaveRequest(request_id=1, stop=True, seconds_left=110.0)
    assert act.ArmDeadline(30.0) in story.then(cause("preemption", 30.0))
    assert story.then(inputs.LeaveNode("node1", "reclaimed", "AWS", 20.0))[-1] == act.ArmDeadline(20.0)
    assert act.AskRequeue(("node2", "node1")) in story.then(inputs.SaveDeadline())
    assert story.then(cause("requeued", None)) == [], "the requeue's own TERM"


@pytest.mark.parametrize("when", ["saving", "checking", "leaving"])
def test_a_cancel_in_the_middle_of_a_preemption_wins(when: str) -> None:
    story = training()
    story.then(cause("preemption"))
    if when != "saving":
        story.then(saved(1))
    if when == "leaving":  # the requeue is being asked for
        story.then(inputs.SaveReadBack(SAVED, True, ""))
    assert kinds(story.then(inputs.SignalArrived("SIGTERM", "lead"))) == [act.AskCause]
    story.then(cause("cancel"))
    story.then(cause("preemption"))
    assert story.model.intent is Intent.CANCELLED, "nothing revives it"
    story.then(inputs.SaveDeadline())
    story.then(inputs.RanksEnded(0))
    assert (act.AskRequeue() in story.actions) == (when == "leaving")
    assert story.actions[-1].code is ExitCode.CANCELLED  # type: ignore[union-attr]


def unfit(node: str = "node2") -> inputs.LeaveNode:
    return inputs.LeaveNode(node, "bad_node", "GPUs: off the bus")


def is_held(done: list[act.Action], why: str) -> bool:
    """Whether the job is to be held, and the journal says why."""
    held = [a.event for a in done if isinstance(a, act.Note) and isinstance(a.event, Held)]
    asked = [a.hold for a in done if isinstance(a, act.AskRequeue)]
    return asked == [True] and len(held) == 1 and why in held[0].reason


def test_bad_nodes_are_left_before_their_ranks_start_after_longer_waits_and_held_at_last() -> None:
    delays = []
    for before in (0, 1, 2, 8, 23):
        story = Story(inputs.Ready(2, 0, before))
        note, asked, _ = story.then(unfit())
        assert isinstance(note, act.Note)
        assert note.event == make_event("cause", cause="bad_node", evidence="node node2: GPUs: off the bus")
        assert isinstance(asked, act.AskRequeue)
        assert (asked.avoid, story.model.failed) == (("node2",), ()), "no budget is used up"
        delays.append(asked.delay_s)
    assert delays == [None, 30, 60, 3600, 3600]
    story = Story(inputs.Ready(2, 0, 24))
    done = story.then(unfit())
    assert is_held(done, "25 attempts in a row met bad nodes")
    assert act.TakeDown() in done


@pytest.mark.scenario("FLT-N06")
def test_starts_that_storage_stops_wait_longer_each_time_and_are_held_at_last() -> None:
    delays = []
    for before in (0, 1, 2, 8, 23):
        (asked,) = [
            a for a in Story().then(inputs.StartHindered("full", before)) if isinstance(a, act.AskRequeue)
        ]
        delays.append(asked.delay_s)
    assert delays == [None, 30, 60, 3600, 3600]
    story = Story()
    done = story.then(inputs.StartHindered("No space left on device", 24, ExitCode.NO_ROOM))
    assert is_held(done, "25 attempts in a row could not begin: No space left on device")
    held = inputs.RequeueAnswered(ExitCode.REQUEUED, "held until somebody says: scontrol release 7")
    assert story.then(held) == [act.Exit(ExitCode.REQUEUED, held.detail)]
    # Outside of Slurm nothing is held.
    story = Story()
    story.then(inputs.StartHindered("No space left on device", 24, ExitCode.NO_ROOM))
    (end,) = story.then(inputs.RequeueAnswered(ExitCode.REQUEUE_FAILED, "no Slurm"))
    assert isinstance(end, act.Exit)
    assert (end.code, "25 attempts" in end.reason) == (ExitCode.NO_ROOM, True)


ENDED = inputs.RanksEnded(1)


FULL = "rank 0: OSError: [Errno 28] No space left on device"
LAUNCH_FAILED = inputs.NodeFailed(
    "n2", "Task launch failed on node n2: Communication failure", lost=True, environment=True
)


@pytest.mark.scenario("FLT-A")
@pytest.mark.parametrize(
    "events",
    [
        pytest.param((inputs.StartHindered("Errno 28"),), id="before the step"),
        pytest.param((inputs.NodeFailed("n1", FULL), ENDED), id="in a rank"),
        pytest.param(
            (inputs.NodeFailed("n2", "Connection closed by peer"), inputs.NodeFailed("n1", FULL), ENDED),
            id="in a rank whose peer spoke first",
        ),
        pytest.param((inputs.NodeFailed("", "no agent", environment=True), ENDED), id="Slurm was away"),
        pytest.param((LAUNCH_FAILED, ENDED), id="a slurmd was away"),
        pytest.param(
            (inputs.ServiceLost("no host", environment=True), ENDED), id="a service's slurmd was away"
        ),
    ],
)
def test_a_restart_that_storage_fails_waits_in_place_then_without_the_nodes_and_is_no_crash(
    events: tuple[inputs.Input, ...],
) -> None:
    story, pauses = Story(inputs.Ready(2, failed=2)), []
    for _ in range(6):
        done = [action for event in events for action in story.then(event)]
        pauses += [action.seconds for action in done if isinstance(action, act.Pause)]
        story.then(inputs.BackoffOver(0))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 15.0]
    assert [action.delay_s for action in done if isinstance(action, act.AskRequeue)] == [60]
    crashed = [a.event for a in story.actions if isinstance(a, act.Note) and isinstance(a.event, Crash)]
    assert {crash.kind for crash in crashed} <= {"environment"}


def test_a_node_whose_slurmd_is_away_gives_its_place_to_a_spare_one_or_is_avoided_after_the_wait() -> None:
    story = Story(inputs.Ready(2))
    for _ in range(6):
        done = [action for event in (LAUNCH_FAILED, ENDED) for action in story.then(event)]
        story.then(inputs.BackoffOver(0))
    assert [action.avoid for action in done if isinstance(action, act.AskRequeue)] == [("n2",)]
    story = Story()
    story.model = Model(msgspec.structs.replace(LIMITS, spare_nodes=1))
    story.then(inputs.Ready(2))
    story.then(LAUNCH_FAILED)
    assert act.Pause(0.0) in story.then(ENDED)
    assert story.then(inputs.BackoffOver(0)) == [act.StartRanks(2, ("n2",))]


@pytest.mark.scenario("FLT-B")
def test_a_slurm_that_is_away_is_waited_for_in_place_however_long() -> None:
    story = Story(inputs.Ready(2))
    away = inputs.StartHindered("no answer", exit_code=ExitCode.NO_SLURM)
    for _ in range(20):
        assert isinstance(story.then(away)[-1], act.Pause)
        story.then(inputs.BackoffOver(0))
    story.then(away)
    assert act.AskRequeue() in story.then(cause("preemption"))


@pytest.mark.scenario("FLT-F")
def test_each_of_our_ranks_has_to_speak_in_time_and_of_a_users_loop_any() -> None:
    for all_ranks, expected in ((True, [act.TakeDown]), (False, [])):
        story = Story(inputs.Ready(2), inputs.RankSaid(msg.RankStarted(rank=0, pid=7)))
        assert kinds(story.then(inputs.StartTimedOut(1, 300.0, all_ranks=all_ranks))) == expected
    story.then(inputs.RankSaid(msg.RankStarted(rank=1, pid=8)))
    assert story.then(inputs.StartTimedOut(1, 300.0, all_ranks=True)) == []


@pytest.mark.scenario("FLT-F")
def test_ranks_that_did_not_start_in_time_are_counted_and_the_limits_key_is_named() -> None:
    story = Story(inputs.Ready(2), inputs.RankSaid(msg.RankStarted(rank=0, pid=7)))
    story.then(inputs.StartTimedOut(1, 300.0, all_ranks=True))
    story.then(ENDED)
    (crash,) = [a.event for a in story.actions if isinstance(a, act.Note) and isinstance(a.event, Crash)]
    assert crash.detail == "1 of 2 ranks sent no message for 300 s after their start (daemon.start_timeout_s)"


def began(rank: int) -> inputs.RankSaid:
    return inputs.RankSaid(msg.RankStarted(rank=rank, pid=7, by_program=False))


@pytest.mark.scenario("USE11")
def test_a_program_that_ends_with_0_and_never_spoke_ends_the_run_and_is_told_the_three_lines() -> None:
    """It was trained whole four times, and ended with 21: "the step ended with 0"."""
    story = Story(inputs.Ready(2), began(0), began(1))
    assert story.then(inputs.StartTimedOut(1, 300.0)) == [], "it may prepare its data for longer"
    refused, end = story.then(inputs.RanksEnded(0))
    assert isinstance(refused, act.Note)
    assert isinstance(end, act.Exit)
    assert end.code is ExitCode.DATA
    for word in (
        "verl_slurm.run",
        "VerlSlurmCallback",
        "VerlSlurmCheckpoint",
        "docs/start.md",
        "RUN/code",
    ):
        assert word in end.reason


@pytest.mark.parametrize(
    ("before", "exit_code"),
    [
        pytest.param([began(0)], 1, id="it_failed"),
        pytest.param([began(0), inputs.RankSaid(msg.RankStarted(rank=1, pid=8))], 0, id="a_rank_spoke"),
        pytest.param([], 0, id="no_program_has_begun"),
        pytest.param([began(0), inputs.NodeFailed("n1", "gone", lost=True)], 0, id="a_node_is_lost"),
        pytest.param([began(0), inputs.SignalArrived("SIGTERM", "lead")], 0, id="slurm_may_end_the_job"),
    ],
)
def test_an_end_before_the_first_step_that_may_have_another_cause_is_tried_again(
    before: list[inputs.Input], exit_code: int
) -> None:
    for trained in (False, True):
        story = Story(inputs.Ready(2, trained=trained), *before)
        assert kinds(story.then(inputs.RanksEnded(exit_code))) == [act.Pause]


def test_a_program_of_a_run_that_has_trained_is_tried_again_after_an_end_without_a_word() -> None:
    story = Story(inputs.Ready(2, trained=True), began(0), began(1))
    assert kinds(story.then(inputs.RanksEnded(0))) == [act.Pause]


@pytest.mark.scenario("FLT-A")
def test_a_last_save_that_cannot_be_read_back_is_not_called_corrupt() -> None:
    finished = [inputs.RankSaid(msg.Finished(rank=rank, step=3)) for rank in (0, 1)]
    story = Story(inputs.Ready(2), progress(), saved(0), *finished, inputs.RanksEnded(0))
    done = story.then(inputs.SaveReadBack(SAVED, False, "Input/output error", unreadable=True))
    notes = [action.event for action in done if isinstance(action, act.Note)]
    assert "cannot be read back: Input/output error" in notes[0].text
    assert isinstance(done[-1], act.Pause)


def raised(rank: int = 0, *, worked: bool, line: int = 7, told: str = "KeyError: 'gone'") -> inputs.RankSaid:
    place = f"KeyError at r.py:{line}"
    told = f"{told} at r.py:{line}"
    return inputs.RankSaid(
        msg.RankRefused(rank=rank, exit_code=int(ExitCode.DATA), reason=told, place=place, worked=worked)
    )


@pytest.mark.scenario("USE11")
def test_user_code_that_never_worked_ends_the_run_at_once() -> None:
    for told in ("KeyError: 'gone'", "[Errno 2] No such file or directory: 'units.json'"):
        story = Story(inputs.Ready(2), progress(step=0))
        assert kinds(story.then(raised(worked=False, told=told))) == [act.TakeDown]
        assert story.then(raised(1, worked=False)) == []
        assert story.then(inputs.RanksEnded(1)) == [act.Exit(ExitCode.DATA, f"{told} at r.py:7")]


@pytest.mark.scenario("USE11")
def test_user_code_that_worked_is_started_once_more_and_then_ends_the_run() -> None:
    story = training()
    assert kinds(story.then(raised(worked=True))) == [act.TakeDown]
    assert story.then(raised(1, worked=True)) == []
    assert kinds(story.then(inputs.RanksEnded(1))) == [act.Pause]
    assert kinds(story.then(inputs.BackoffOver(1))) == [act.StartRanks]
    replayed = msg.Progress(rank=0, step=3, phase="generate", index=1, safe_points=1, new_rollouts=0)
    story.then(inputs.RankSaid(replayed))
    assert kinds(story.then(raised(worked=True))) == [act.TakeDown]
    (end,) = [a for a in story.then(inputs.RanksEnded(1)) if isinstance(a, act.Exit)]
    assert end.code is ExitCode.DATA


@pytest.mark.scenario("USE01")
def test_a_start_that_finds_the_run_done_ends_it_and_keeps_a_cancel() -> None:
    done = inputs.AllDone("step_000005", "all 5 steps are done")
    assert Story(inputs.Ready(2)).then(done)[-1] == act.Exit(ExitCode.OK, "all 5 steps are done")
    cancelled = Story(inputs.Ready(2), cause("cancel"))
    end = cancelled.then(done)[-1]
    assert isinstance(end, act.Exit)
    assert end.code is ExitCode.CANCELLED


def test_a_crash_is_started_anew_until_the_budget_is_spent_which_a_verified_checkpoint_renews() -> None:
    story = training()
    assert kinds(story.then(inputs.NodeFailed("n2", "rank 1 was killed"))) == [act.TakeDown]
    assert story.then(inputs.NodeFailed("n1", "connection reset")) == []
    assert story.then(inputs.RanksEnded(22))[-1] == act.Pause(0.0)  # it had sampled something new
    assert story.then(inputs.BackoffOver(0))[-1] == act.StartRanks(2)
    for _ in range(3 * LIMITS.crash_budget):
        story.then(inputs.SaveReadBack("step_000004", True, ""))
        assert story.model.failed == (), "and no node is suspected any more"
        assert kinds(story.then(inputs.RanksEnded(1))) == [act.Pause]
        story.then(inputs.BackoffOver(0))
    for _ in range(LIMITS.crash_budget - 1):
        assert kinds(story.then(inputs.RanksEnded(1))) == [act.Pause]
        story.then(inputs.BackoffOver(0))
    assert kinds(story.then(inputs.RanksEnded(1))) == [act.AskRequeue]


@pytest.mark.parametrize(
    ("code", "end"), [(int(ExitCode.SCHEMA), ExitCode.SCHEMA), (99, ExitCode.INTERNAL)], ids=["known", "not"]
)
def test_what_the_trainer_refuses_is_not_tried_again(code: int, end: ExitCode) -> None:
    story = Story(inputs.Ready(2))
    refused = msg.RankRefused(rank=0, exit_code=code, reason="another layout")
    assert kinds(story.then(inputs.RankSaid(refused))) == [act.TakeDown]
    assert story.then(inputs.RanksEnded(1)) == [act.Exit(end, "another layout")]


DONE = tuple(inputs.RankSaid(msg.Finished(rank=rank, step=30)) for rank in (0, 1))
GONE = inputs.RanksEnded(0)
GOOD, BAD = inputs.SaveReadBack(SAVED, True, ""), inputs.SaveReadBack(SAVED, False, "sha256")
OVER, AGAIN = act.Exit(ExitCode.OK, "all steps are done"), act.Pause(0.0)


@pytest.mark.parametrize(
    ("events", "last"),
    [
        ((cause("preemption"), *DONE, GONE), OVER),  # whatever was asked for
        ((saved(0), *DONE, GONE, GOOD), OVER),
        ((saved(0), *DONE, GONE, BAD), AGAIN),
        ((saved(0), BAD, *DONE, GONE), AGAIN),  # a small one takes less than the end of the processes
        ((saved(0), *DONE, BAD, GONE), AGAIN),
        ((saved(0), BAD, saved(0), GOOD, *DONE, GONE), OVER),  # one before the last
        ((cause("preemption"), saved(1), *DONE, BAD, GONE), act.AskRequeue()),
        ((cause("preemption"), saved(1), *DONE, GONE, BAD), act.AskRequeue()),
        ((cause("cancel"), saved(1), *DONE, BAD, GONE), act.Exit(ExitCode.CANCELLED, "cancel: cancelled")),
        ((cause("cancel"), saved(1), *DONE, GONE, BAD), act.Exit(ExitCode.CANCELLED, "cancel: cancelled")),
    ],
)
def test_a_run_is_done_when_its_last_checkpoint_is_good_and_not_before(
    events: tuple[inputs.Input, ...], last: act.Action
) -> None:
    story = training()
    for event in events[:-1]:
        assert not [action for action in story.then(event) if isinstance(action, act.Exit)]
    assert story.then(events[-1])[-1] == last


@pytest.mark.scenario("L08")
def test_the_back_off_doubles_while_starts_bring_nothing_new() -> None:
    story = training()
    story.model = msgspec.structs.replace(story.model, limits=Limits(99, 1.0, 99))
    waits = []
    for _ in range(3):
        waits += [a.seconds for a in story.then(inputs.RanksEnded(1)) if isinstance(a, act.Pause)]
        story.then(inputs.BackoffOver(0))
    story.then(progress())
    waits += [a.seconds for a in story.then(inputs.RanksEnded(1)) if isinstance(a, act.Pause)]
    assert waits == [0.0, 1.0, 2.0, 0.0]


@pytest.mark.scenario("L08")
def test_starts_without_progress_end_the_run_with_their_own_exit_code() -> None:
    story = training()
    story.then(inputs.RanksEnded(1))
    (end,) = story.then(inputs.BackoffOver(3, "3 restarts in a row; the last one: boom"))
    assert isinstance(end, act.Exit)
    assert (end.code, end.reason[-4:]) == (ExitCode.NO_PROGRESS, "boom")


@pytest.mark.parametrize(
    "then", [inputs.RanksEnded(0), inputs.RanksEnded(1), inputs.RunLost("attempt 2 of job 8")]
)
@pytest.mark.parametrize("saves", [False, True])
def test_an_attempt_that_lost_the_run_takes_its_ranks_down_and_says_so(
    then: inputs.Input, saves: bool
) -> None:
    """Told again, it leaves without them: srun may wait for a node that is lost."""
    story = training()
    if saves:
        story.then(cause("preemption"))
    assert kinds(story.then(inputs.RunLost("attempt 2 of job 8"))) == [act.TakeDown]
    (end,) = story.then(then)
    assert isinstance(end, act.Exit)
    assert end.code is ExitCode.FENCED
    assert "attempt 2 of job 8" in end.reason


def test_a_start_that_says_nothing_is_a_crash_and_an_old_timer_is_nothing() -> None:
    story = Story(inputs.Ready(2))
    assert story.then(inputs.StartTimedOut(7, 300.0)) == []
    assert kinds(story.then(inputs.StartTimedOut(1, 300.0))) == [act.TakeDown]
    assert kinds(story.then(inputs.RanksEnded(0))) == [act.Pause]


def hung(restart: int = 1, node: str = "n2") -> inputs.Hung:
    return inputs.Hung(restart, node, "rank 1 has passed no safe point for 300 s")


def test_a_hang_writes_stacks_and_is_then_a_crash_with_a_budget_of_its_own() -> None:
    story = Story(inputs.Ready(2), progress())
    assert story.then(hung(restart=0)) == [], "of a former restart"
    for number in range(1, LIMITS.hang_budget + 1):
        assert story.then(hung(number))[-1] == act.TakeDown(stacks=True)
        assert kinds(story.then(inputs.RanksEnded(9))) == [act.Pause]
        assert kinds(story.then(inputs.BackoffOver(0))) == [act.StartRanks]
        story.then(progress())
    story.then(hung(LIMITS.hang_budget + 1))
    actions = story.then(inputs.RanksEnded(9))
    assert act.AskRequeue(avoid=("n2",)) in actions
    assert story.model.cause == "hang"
    saving = training()
    saving.then(cause("preemption"))
    assert saving.then(hung()) == [], "a save before the end has a deadline of its own"


def test_a_crash_uses_up_no_budget_of_hangs_and_ranks_that_train_make_what_is_absent_the_environments_fault() -> (
    None
):
    mixed = training()
    for _ in range(LIMITS.crash_budget):
        for event in (
            inputs.NodeFailed("n1", "killed"),
            inputs.RanksEnded(1),
            inputs.BackoffOver(0),
            progress(),
        ):
            mixed.then(event)
    mixed.then(hung(mixed.model.restart))
    assert kinds(mixed.then(inputs.RanksEnded(9))) == [act.Pause]
    mixed.then(inputs.BackoffOver(0))
    # No attempt before this one has trained: its own ranks have.
    mixed.then(inputs.NodeFailed("n1", f"{NOT_SET_UP}: slurm.setup"))
    assert kinds(mixed.then(inputs.RanksEnded(1))) == [act.Pause]
    assert [kind for kind, _ in mixed.model.failed] == [
        *("crash",) * LIMITS.crash_budget,
        "hang",
        "environment",
    ]


def test_processes_that_do_not_end_are_ended_and_the_run_is_done() -> None:
    story = training()
    for rank in range(2):
        story.then(inputs.RankSaid(msg.Finished(rank=rank, step=30)))
    assert story.then(hung())[-1] == act.TakeDown(stacks=True)
    assert story.then(inputs.RanksEnded(9)) == [act.Exit(ExitCode.OK, "all steps are done")]


def test_a_node_that_is_lost_again_and_again_is_left_behind() -> None:
    story = Story(inputs.Ready(2), progress())
    actions: list[act.Action] = []
    for _ in range(LIMITS.node_budget + 1):
        story.then(inputs.NodeFailed("n2", "the agent is gone without a word", lost=True))
        actions = story.then(inputs.RanksEnded(1))
        story.then(inputs.BackoffOver(0))
        story.then(progress())
    assert act.AskRequeue(avoid=("n2",)) in actions


@pytest.mark.parametrize(
    ("failed", "blamed"),
    [
        ([("crash", "n1")], ()),
        ([("crash", "n1"), ("hang", "n1")], ("n1",)),
        ([("crash", "n1"), ("crash", "n2"), ("crash", "n1")], ()),
        ([("crash", ""), ("crash", "")], ()),
    ],
)
def test_a_node_is_blamed_only_where_all_of_several_failures_are_its_own(
    failed: list[tuple[FailureKind, str]], blamed: tuple[str, ...]
) -> None:
    assert suspects(tuple(failed)) == blamed


_ABSENT = "the key file cannot be read: /k (found No such file or directory)"
_CLOSED = "a model file cannot be read: /m/config.json (found Permission denied)"


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    "said",
    [
        inputs.NodeFailed("n1", f"{NOT_SET_UP}: slurm.setup (found no file)"),
        inputs.ServiceLost(f"service judge on n1: {NOT_SET_UP}: services.judge.command"),
        inputs.RankSaid(msg.RankRefused(rank=1, exit_code=int(ExitCode.KEY), reason=_ABSENT)),
        inputs.RankSaid(msg.RankRefused(rank=1, exit_code=int(ExitCode.DATA), reason=_CLOSED)),
    ],
)
def test_what_is_absent_is_the_environments_fault_once_ranks_have_trained(
    said: inputs.Input, trained: bool
) -> None:
    story = Story(inputs.Ready(2, trained=trained), said, inputs.RanksEnded(1))
    crashes = [one.event for one in story.actions if isinstance(one, act.Note)]
    kinds_of_crash = [event.kind for event in crashes if isinstance(event, Crash)]
    # Before that, a wrong path is more likely: it counts, or ends the run.
    refused = isinstance(said, inputs.RankSaid)
    assert kinds_of_crash == (["environment"] if trained else [] if refused else ["crash"])
