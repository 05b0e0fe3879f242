"""The life of a run as intervals without a gap, and where its time went, from made-up journals."""

from typing import Any

import pytest

from tests.journals import make_events
from tests.many_runs import Teller
from verl_slurm.journal.folds.goodput import RunNumbers
from verl_slurm.journal.folds.time_use import PARTS, TimeUse, time_use
from verl_slurm.journal.folds.timeline import Interval, Timeline


def intervals(teller: Teller, after_s: float = 0.0) -> list[Interval]:
    return Timeline(make_events(teller.events)).until(teller.now.timestamp() + after_s)


def kinds(teller: Teller, after_s: float = 0.0) -> list[tuple[str, float]]:
    return [(one.kind, round(one.seconds, 3)) for one in intervals(teller, after_s)]


def used(teller: Teller, *steps: tuple[int, float]) -> TimeUse:
    now = teller.now.timestamp()
    numbers = RunNumbers(make_events(teller.events))
    for step, seconds in steps:
        numbers.step_took(step, seconds)
    return time_use(numbers, intervals(teller), now)


@pytest.fixture
def teller() -> Teller:
    teller = Teller("7", "slurm")
    teller.say("submitted", cluster="slurm")
    teller.start(queued_s=40.0)
    return teller


def test_a_run_waits_starts_and_trains(teller: Teller) -> None:
    assert kinds(teller, 10.0) == [("queued", 40.0), ("starting", 22.0), ("training", 15.0)]


def test_a_preemption_is_seen_saved_left_queued_and_recovered_from(teller: Teller) -> None:
    teller.preempt()
    teller.start(queued_s=60.0)
    assert kinds(teller)[2:] == [
        ("training", 35.0),
        ("preempted", 0.1),
        ("saving", 3.0),
        ("preempted", 3.5),
        ("queued", 60.0),
        ("starting", 22.0),
        ("recovering", 5.0),
    ]
    assert [one.attempt for one in intervals(teller)] == [0, 1, 1, 1, 1, 1, 1, 2, 2]


def test_a_hang_lasts_from_its_verdict_to_the_end_of_the_ranks(teller: Teller) -> None:
    teller.say("hang", 10.0, detail="rank 3")
    teller.say("crash", 60.0, kind="hang", detail="rank 3")
    teller.say("restart", 4.0, number=2, resume=None)
    teller.say("training", 10.0, step=0, phase="generate", index=0)
    assert kinds(teller)[3:] == [("hung", 60.0), ("preempted", 4.0), ("starting", 10.0)]


def test_a_lead_that_died_leaves_its_nodes_with_its_last_word(teller: Teller) -> None:
    teller.save()
    teller.start(queued_s=300.0)
    assert kinds(teller)[2:] == [
        ("training", 10.0),
        ("queued", 300.0),
        ("starting", 22.0),
        ("recovering", 5.0),
    ]


def test_a_guest_trains_from_its_first_safe_point_on(teller: Teller) -> None:
    teller.preempt()
    teller.start()
    teller.events = teller.events[:-2]
    teller.say("training", 20.0, step=3, phase="step_end")
    assert kinds(teller, 7.0)[-1] == ("training", 7.0)


def test_nothing_lies_between_an_end_and_the_next_submission(teller: Teller) -> None:
    teller.say("ended", 10.0, exit_code=0)
    assert kinds(teller, 1000.0)[-1] == ("training", 15.0)
    teller.say("submitted", 5000.0, cluster="slurm", attempt=None)
    teller.start(queued_s=8.0)
    assert kinds(teller)[3:] == [("queued", 8.0), ("starting", 22.0), ("training", 5.0)]
    assert used(teller).parts == {"unfinished": 20.0, "starting": 44.0, "queued": 48.0}


def test_a_fenced_attempt_and_a_clock_that_goes_back_change_nothing(teller: Teller) -> None:
    before = kinds(teller, 10.0)
    teller.say("crash", 1.0, detail="late", attempt=0)
    teller.now = teller.now.replace(year=2020)
    teller.say("hang", 0.0, detail="an hour ago")
    teller.now = teller.now.replace(year=2026)
    assert kinds(teller, 9.0)[:2] == before[:2]
    assert all(one.seconds > 0 for one in intervals(teller))


def test_the_parts_add_up_to_all_time_and_goodput_is_that_of_the_metrics(teller: Teller) -> None:
    teller.save()
    teller.preempt()
    teller.start(queued_s=60.0)
    teller.say("ended", 30.0, exit_code=0)
    use = used(teller, (1, 20.0), (2, 12.0), (2, 6.0), (3, 9.0))
    assert use.parts == {
        "useful": 35.0,
        "repeated": 12.0,
        "unfinished": 28.0,
        "saving": 3.0,
        "starting": 44.0,
        "preempted": 3.6,
        "requeued": 60.0,
        "queued": 40.0,
    }
    assert sum(use.parts.values()) == pytest.approx(use.wall_s)
    assert use.wall_s - use.allocated_s == pytest.approx(100.0)
    assert use.goodput == pytest.approx(35.0 / use.allocated_s)
    assert use.ettr == pytest.approx(35.0 / use.wall_s)
    assert set(use.parts) <= set(PARTS)


def test_without_a_step_there_is_no_goodput(teller: Teller) -> None:
    use = used(teller)
    assert (use.goodput, use.ettr) == (None, None)


def test_event_by_event_is_as_read_back(teller: Teller) -> None:
    teller.preempt()
    teller.start()
    heard = Timeline()
    for event in make_events(teller.events):
        heard.feed(event)
    assert heard.until(teller.now.timestamp()) == intervals(teller)


def test_what_a_person_asks_for_is_no_sign_of_an_interruption(teller: Teller) -> None:
    asked: dict[str, Any] = {"attempt": None}
    teller.say("requeue_asked", 5.0, **asked)
    teller.say("cause", 1.0, cause="operator", evidence="a save")
    assert kinds(teller, 4.0)[-1] == ("training", 15.0)
