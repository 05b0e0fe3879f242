"""The history of a run: made-up lives whose outages are known, then single figures with a clock of their own."""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings, strategies as st

from tests.journals import make_event, make_events
from tests.many_runs import Teller
from verl_slurm.journal import events as ev
from verl_slurm.journal.causes import CAUSES, SERIES, CauseKind
from verl_slurm.journal.history import PARTS, History, mean_time_between

# ---- lives


def _restart(teller: Teller) -> None:
    teller.say("restart", 4.0, number=2, resume=teller.last or None)
    teller.go_on()


def _crash(teller: Teller, kind: str, **fields: object) -> None:
    teller.say("crash", 3.0, kind=kind, detail=kind, **fields)
    _restart(teller)


def _hang(teller: Teller) -> None:
    teller.say("hang", 20.0, detail="rank 3")
    _crash(teller, "hang")


def _leave(teller: Teller, cause: CauseKind) -> None:
    """Ends with a save that fails."""
    teller.say("cause", 5.0, cause=cause, evidence=cause)
    teller.say("save", stop=True)
    teller.say("save_failed", 2.0)
    teller.say("degraded")
    teller.say("ended", exit_code=25)
    teller.start()


def _submit_again(teller: Teller, exit_code: int) -> None:
    teller.say("ended", 9.0, exit_code=exit_code)
    teller.job_id = str(int(teller.job_id) + 1)
    teller.say("submitted", 5000.0, cluster="slurm", attempt=None)
    teller.start()


def _cancel(teller: Teller) -> None:
    teller.say("cancel_asked", 5.0, attempt=None)
    teller.say("cause", cause="cancel")
    teller.save(emergency=True)
    _submit_again(teller, 23)


def _preempt(teller: Teller) -> None:
    teller.preempt()
    teller.start(300.0)


def _fenced(teller: Teller) -> None:
    teller.start()
    teller.say("fenced", exit_code=20, attempt=teller.attempt - 1)
    teller.say("crash", detail="late", attempt=teller.attempt - 1)


def _asked(teller: Teller) -> None:
    teller.say("requeue_asked", attempt=None)
    teller.say("cause", 5.0, cause="operator", seconds_left=None)
    teller.save()


_ENDS: tuple[CauseKind, ...] = tuple(
    kind for kind in get_args(CauseKind) if CAUSES[kind].ended_by and kind != "cancel"
)
MOVES: dict[str, tuple[Callable[[Teller], None], str, str, int]] = {
    "save": (Teller.save, "", "", 0),
    "asked": (_asked, "", "", 0),
    "unanswered": (lambda teller: teller.say("cause", 5.0, cause="unknown"), "", "", 0),
    "preemption": (_preempt, "preemption", "preemption", 0),
    "crash": (lambda teller: _crash(teller, "crash"), "crash", "crash", 1),
    "environment": (lambda teller: _crash(teller, "environment"), "crash", "crash", 1),
    "stranger": (lambda teller: _crash(teller, "stranger"), "stranger", "stranger", 1),
    "node": (lambda teller: _crash(teller, "node", node="n2", replaced=True), "node_lost", "node_lost", 1),
    "hang": (_hang, "hang", "hang", 1),
    "dead": (Teller.start, "lead_lost", "lead_lost", 1),
    "orphan": (
        lambda teller: (teller.say("orphaned", 9.0, node_id=1, accepted=True), teller.start())[1],
        "lead_lost",
        "lead_lost",
        1,
    ),
    "fenced": (_fenced, "lead_lost", "lead_lost", 0),
    "done": (lambda teller: _submit_again(teller, 0), "", "submitted", 0),
    "failed": (lambda teller: _submit_again(teller, 22), "", "submitted", 0),
    "cancel": (_cancel, "", "submitted", 0),
    **{f"leaves: {kind}": (lambda t, k=kind: _leave(t, k), kind, CAUSES[kind].series, 1) for kind in _ENDS},  # type: ignore[misc]
}
"""Name -> what happens (the run is back after it), the outage's cause, the restart's label, and 1 if it lost work."""


@settings(max_examples=150, deadline=None)
@given(
    moves=st.lists(st.sampled_from(sorted(MOVES)), max_size=12),
    guest=st.booleans(),
    step_s=st.floats(0.1, 40.0),
)
def test_any_life_adds_up_and_its_outages_are_those_that_happened(
    moves: list[str], guest: bool, step_s: float
) -> None:
    teller = Teller("7", "slurm", has_rollouts=not guest)
    teller.say("submitted", cluster="slurm", attempt=None)
    teller.start()
    for move in moves:
        MOVES[move][0](teller)
    events, now = make_events(teller.events), teller.now.timestamp() + 10.0
    history, heard = History(events), History()
    for event in events:
        heard.feed(event)
    for step in (1, 2, 3, 2, 3, 4):
        history.step_took(step, step_s)
        heard.feed_row({"step": step, "step_s": step_s})
    assert vars(heard) == vars(history)
    # ---- what happened is what is counted
    expected = [MOVES[move] for move in moves]
    assert [one.cause for one in history.outages] == [cause for _, cause, _, _ in expected if cause]
    assert all(one.back and one.trained for one in history.outages)
    restarts = Counter(series for _, _, series, _ in expected if series)
    assert history.restarts == dict.fromkeys(SERIES, 0) | restarts
    assert history.num_lossy == sum(lossy for _, _, _, lossy in expected)
    assert len(history.attempts) == teller.attempt
    # ---- no second is counted twice
    for former, later in pairwise(history.outages):
        began, then = (datetime.fromisoformat(one.began).timestamp() for one in (former, later))
        assert began + (former.seconds or 0.0) <= then + 0.002
    for one in history.outages:
        inner = [one.queue_s, one.start_s, one.again_s]
        assert sum(part or 0.0 for part in inner) <= (one.seconds or 0.0) + 0.01
    # ---- the parts add up, and the time without the queue is the allocated one
    intervals, use = history.intervals(now), history.time_use(now)
    assert all(one.seconds > 0 for one in intervals)
    assert all(former.ended <= later.began for former, later in pairwise(intervals))
    assert sum(use.parts.values()) == pytest.approx(use.wall_s, abs=0.01)
    queued = sum(one.seconds for one in intervals if one.kind == "queued")
    assert use.wall_s - queued == pytest.approx(use.allocated_s, abs=0.01)
    assert set(use.parts) <= set(PARTS)
    assert (use.goodput or 0) <= 1.0
    assert use.useful_s == pytest.approx(4 * step_s, abs=0.01)
    assert history.repeated_seconds == pytest.approx(2 * step_s)


anything = st.builds(
    lambda kind, at, attempt: make_event(
        kind, time="" if at is None else datetime.fromtimestamp(at, UTC).isoformat(), attempt=attempt
    ),
    st.sampled_from(sorted(ev.KINDS)),
    st.none() | st.floats(0, 1e6),
    st.none() | st.integers(-1, 4),
)


@given(st.lists(anything))
def test_whatever_a_journal_says_the_figures_can_be(events: list[ev.Event]) -> None:
    history = History(events)
    assert all(one.seconds > 0 for one in history.intervals(2e6))
    assert history.allocated_seconds(2e6) >= history.allocated_seconds() >= 0.0
    assert history.num_lossy >= 0
    assert history.interrupted_s >= 0.0
    assert history.time_use(2e6).goodput is None


# ---- one interruption


@pytest.fixture
def teller() -> Teller:
    teller = Teller("7", "slurm")
    teller.say("submitted", cluster="slurm")
    teller.start()
    return teller


def told(teller: Teller) -> History:
    return History(make_events(teller.events))


def kinds(teller: Teller, after_s: float = 0.0) -> list[tuple[str, float]]:
    intervals = told(teller).intervals(teller.now.timestamp() + after_s)
    return [(one.kind, round(one.seconds, 3)) for one in intervals]


def test_a_preemption_costs_what_lies_between_the_warning_and_the_first_new_rollout(teller: Teller) -> None:
    assert kinds(teller, 10.0) == [("queued", 40.0), ("starting", 22.0), ("training", 15.0)]
    teller.save()
    teller.preempt()
    (lasting,) = told(teller).outages_until(teller.now + timedelta(seconds=30))
    assert lasting.queue_s == 30.0, "so far"
    assert (lasting.cause, lasting.seconds, lasting.tokens_lost) == ("preemption", None, 0)
    teller.start(queued_s=40.0)
    (one,) = told(teller).outages
    # 0.1 asked, 3 saved, 2 verified, 0.5 requeued, 1 ended, 40 queued, 2 resume and restart, 20 ranks, 5 rollout
    assert (one.save_s, one.queue_s, one.start_s, one.again_s) == (3.1, 40.0, 22.0, 5.0)
    assert (one.seconds, one.back) == (73.6, True)
    assert one.saved == one.resumed == "step_000001_sp0088"
    assert one.tokens_lost == 0
    assert one.began == "2026-11-01T08:01:43.000+00:00"
    assert kinds(teller)[2:] == [
        ("training", 40.0),
        ("preempted", 0.1),
        ("saving", 3.0),
        ("preempted", 3.5),
        ("queued", 40.0),
        ("starting", 22.0),
        ("recovering", 5.0),
    ]
    attempts = [one.attempt for one in told(teller).intervals(teller.now.timestamp())]
    assert attempts == [0, 1, 1, 1, 1, 1, 1, 2, 2]


def test_a_save_is_counted_on_once_it_is_verified_until_the_ranks_start_from_another(teller: Teller) -> None:
    teller.preempt()
    del teller.events[-3:]  # killed before the save was read back
    assert told(teller).outages[0].tokens_lost is None
    teller.say("verified", name=teller.last)
    assert told(teller).outages[0].tokens_lost == 0
    teller.last = ""
    teller.start()
    assert told(teller).outages[0].tokens_lost is None


def test_rollouts_that_a_start_found_lost_belong_to_the_interruption_before_it(teller: Teller) -> None:
    teller.say("crash", detail="killed")
    teller.say("warning", topic="rollouts", text="at least 8")
    teller.say("restart", number=2, resume=None)
    assert told(teller).outages[0].rollouts_lost == "at least 8"


def test_a_hang_lasts_from_its_verdict_to_the_end_of_the_ranks_and_has_no_queue(teller: Teller) -> None:
    teller.say("hang", detail="rank 3")
    teller.say("crash", 60.0, kind="hang", detail="ended")
    teller.say("restart", 4.0, number=2, resume=None)
    teller.go_on(10.0, 1.0)
    teller.say("cause", 1.0, cause="preemption", evidence="x" * 5000)
    one, cut = told(teller).outages
    assert (one.cause, one.seconds, one.queue_s, one.start_s) == ("hang", 75.0, 0.0, 14.0)
    assert (one.evidence, one.attempt, cut.evidence) == ("rank 3", 1, "x" * 1000)
    assert one.tokens_lost is None, "the micro-batches of the ranks that hung"
    assert kinds(teller)[3:6] == [("hung", 60.0), ("preempted", 4.0), ("starting", 10.0)]


def test_a_lead_that_died_is_missed_from_its_last_word_on(teller: Teller) -> None:
    teller.save()
    teller.start(queued_s=500.0)
    (one,) = told(teller).outages
    assert (one.cause, one.queue_s, one.seconds) == ("lead_lost", 500.0, 527.0)
    queued = [("training", 10.0), ("queued", 500.0), ("starting", 22.0), ("recovering", 5.0)]
    assert kinds(teller)[2:] == queued


def test_a_second_one_before_the_run_is_back_begins_where_the_first_ends(teller: Teller) -> None:
    teller.preempt()
    teller.start()
    del teller.events[-1]  # no new rollout: the next one came before
    teller.preempt()
    teller.start()
    first, second = told(teller).outages
    assert (first.back, second.back) == (False, True)
    began, then = (datetime.fromisoformat(one.began) for one in (first, second))
    assert first.seconds == (then - began) / timedelta(seconds=1)
    assert told(teller).interrupted_s == pytest.approx((first.seconds or 0) + (second.seconds or 0))


def test_the_run_may_end_before_anything_new_was_sampled(teller: Teller) -> None:
    teller.preempt()
    teller.start()
    del teller.events[-1]
    teller.say("ended", 3.0, exit_code=0)
    (one,) = told(teller).outages
    assert one.back
    assert one.seconds is not None


def test_nothing_lies_between_an_end_and_the_next_submission(teller: Teller) -> None:
    teller.say("ended", 10.0, exit_code=0)
    assert kinds(teller, 1000.0)[-1] == ("training", 15.0)
    teller.say("submitted", 5000.0, cluster="slurm", attempt=None)
    teller.start(queued_s=8.0)
    assert kinds(teller)[3:] == [("queued", 8.0), ("starting", 22.0), ("training", 5.0)]
    use = told(teller).time_use(teller.now.timestamp())
    assert use.parts == {"unfinished": 20.0, "starting": 44.0, "queued": 48.0}
    assert (use.goodput, use.ettr) == (None, None), "no step has a duration"


def test_a_clock_that_goes_backwards_is_no_time(teller: Teller) -> None:
    teller.preempt()
    teller.now -= timedelta(hours=1)
    teller.start()
    (one,) = told(teller).outages
    assert (one.seconds, one.queue_s) == (0.0, 0.0)
    assert told(teller).attempts[1].last == teller.now.timestamp()


def test_a_guest_is_back_where_its_training_goes_on() -> None:
    """It reports no rollouts, so that no first new one ever ended its interruption."""
    teller = Teller("7", "slurm", has_rollouts=False)
    teller.start()
    teller.preempt()
    teller.start(queued_s=40.0)
    (one,) = told(teller).outages
    assert (one.back, one.start_s, one.again_s) == (True, 22.0, None)
    assert kinds(teller, 7.0)[-1] == ("training", 7.0)


# ---- metrics


def test_a_save_counts_from_when_it_was_written_and_only_once_it_was_read_back(teller: Teller) -> None:
    history = told(teller)

    def feed(*lines: tuple[str, dict[str, object]]) -> float | None:
        for kind, fields in lines:
            teller.say(kind, 10.0, **fields)
            history.feed(make_events(teller.events[-1:])[0])
        return history.last_save_at

    began = teller.now.timestamp()
    older, newer = {"name": "step_000002"}, {"name": "step_000004"}
    assert feed(("saved", older)) is None
    assert history.all_saves[-1].at == began + 10
    assert feed(("verified", older), ("saved", newer), ("corrupt", newer)) == began + 10
    assert feed(("saved", newer), ("verified", newer)) == began + 50
    # What a start goes back to is the last save.
    assert feed(("restart", {"number": 2, "resume": "step_000002"})) == began + 10
    assert feed(("restart", {"number": 3, "resume": None})) is None
    # The ranks have read it back on the nodes' disks.
    assert feed(("saved", {"name": "step_000006", "on_shared": False})) == began + 90


@pytest.mark.parametrize("fields", [{"seconds": -1.0, "num_bytes": 5}, {"seconds": 1.0}, {}])
def test_the_cost_of_a_save_that_makes_no_sense_is_not_known(fields: dict[str, object]) -> None:
    (save,) = History([make_event("saved", **fields)]).all_saves
    assert save.cost is None


def test_measured_saves_are_the_newest_to_shared_storage_and_only_those_that_make_sense() -> None:
    said = [(1, 1.0), (2, 0.0), (0, 1.0), (3, None), (4, 2.0), (5, 3.0)]
    events = [make_event("saved", num_bytes=count, seconds=seconds) for count, seconds in said]
    events.append(make_event("saved", num_bytes=9, seconds=9.0, on_shared=False))
    history = History(events)
    assert history.measured_saves(9) == [(1, 1.0), (4, 2.0), (5, 3.0)]
    assert history.measured_saves(2) == [(4, 2.0), (5, 3.0)]
    assert history.measured_saves(0) == []


@pytest.mark.parametrize(
    ("cause", "series"), [("failed", "node_lost"), ("growth", "requeued"), ('x"} 1\nevil 1', "other")]
)
def test_a_restart_is_counted_by_a_closed_set_of_labels(teller: Teller, cause: str, series: str) -> None:
    teller.say("cause", cause=cause)
    teller.say("ended", exit_code=25)
    teller.start()
    assert told(teller).restarts == dict.fromkeys(SERIES, 0) | {series: 1}


def test_submit_may_write_its_word_when_the_lead_has_begun_already(teller: Teller) -> None:
    teller.say("submitted", job_id="7", attempt=None)
    _crash(teller, "crash")
    assert told(teller).restarts["crash"] == 1


def test_requeues_are_counted_by_their_outcome(teller: Teller) -> None:
    teller.say("requeue", accepted=False)
    teller.say("requeue", accepted=True)
    assert told(teller).requeues == {"accepted": 1, "refused": 1}


def test_goodput_is_of_the_steps_that_count(teller: Teller) -> None:
    history, began = History(make_events(teller.events[:2])), make_events(teller.events)[1].at or 0.0
    assert history.goodput(began) is None
    for step, seconds in ((1, 10.0), (2, 10.0), (3, 10.0), (2, 12.0)):  # the run went back behind step 1
        history.step_took(step, seconds)
    assert history.useful_seconds == pytest.approx(22.0)
    assert history.goodput(began + 44) == pytest.approx(0.5)
    assert history.goodput(began + 11) == 1.0
    history.step_took(5, 1.0)  # a line of the log was lost
    for step, seconds in ((0, 1.0), (-1, 1.0), (10**12, 1.0), (1, -1.0), (1, float("inf"))):
        history.step_took(step, seconds)
    assert (history.useful_seconds, history.repeated_seconds) == (23.0, 20.0)


@pytest.mark.parametrize(
    ("says", "num_lossy", "hours", "expected_hours"),
    [
        ("nothing seen: what was believed", 0, 0.0, 24.0),
        ("a day without one makes it longer", 0, 24.0, 48.0),
        ("one in a day agrees", 1, 24.0, 24.0),
        ("what is seen outweighs the belief", 999, 976.0, 1.0),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_the_mean_time_between_them(says: str, num_lossy: int, hours: float, expected_hours: float) -> None:
    found = mean_time_between(num_lossy, hours * 3600, 24 * 3600.0)
    assert found == pytest.approx(expected_hours * 3600), says


# ---- a number that comes again, on another cluster or where a cluster's begin anew, is another job

FORMER = [
    ev.Submitted(slurm="there", job_id="7"),
    ev.Started(slurm="there", attempt=1, job_id="7"),
    ev.Successor("7", slurm="there", job_id="8"),
]


def test_the_same_number_on_another_cluster_is_a_job_of_its_own() -> None:
    job = History([*FORMER, ev.Submitted(slurm="here", job_id="7")]).job
    assert job is not None
    assert (job.job_id, job.slurm, job.queued_by_us) == ("7", "here", True)


def test_a_number_that_comes_again_follows_nothing_and_has_no_successor() -> None:
    jobs = History(FORMER)
    assert (jobs.successor_of("7"), jobs.predecessor_of("8")) == ("8", "7")
    again = History([*FORMER, ev.Submitted(slurm="here", job_id="7"), ev.Submitted(slurm="here", job_id="8")])
    assert (again.successor_of("7"), again.predecessor_of("8")) == ("", "")


def test_a_job_that_another_cluster_of_a_federation_started_is_of_that_one() -> None:
    job = History([ev.Submitted(slurm="a", job_id="7"), ev.Started(slurm="b", attempt=1, job_id="7")]).job
    assert job is not None
    assert (job.slurm, job.queued_by_us) == ("b", False)


def test_a_job_that_has_ended_before_submit_says_its_word_has_ended() -> None:
    begun: list[ev.Event] = [
        ev.Started(attempt=1, job_id="7"),
        ev.Ended(exit_code=0, exit="done", job_id="7"),
    ]
    late = [*begun, ev.Submitted(job_id="7")]
    assert isinstance(History(late).word, ev.Ended)
    assert History(late).has_ended("7")
    # Numbers come again.
    assert isinstance(History([*late, ev.Submitted(job_id="7")]).word, ev.Submitted)
    assert isinstance(History([*begun, ev.Submitted(job_id="8")]).word, ev.Submitted)
