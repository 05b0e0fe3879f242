"""What an interruption cost, from made-up journals with a clock of their own."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.journals import make_event, make_events
from tests.many_runs import Teller
from verl_slurm.journal.folds.outages import Outages


def told(teller: Teller) -> Outages:
    return Outages(make_events(teller.events))


@pytest.fixture
def teller() -> Teller:
    teller = Teller("7", "slurm")
    teller.say("submitted", cluster="slurm")
    teller.start()
    return teller


def test_a_preemption_costs_what_lies_between_the_warning_and_the_first_new_rollout(teller: Teller) -> None:
    teller.save()
    teller.preempt()
    (lasting,) = told(teller).each
    assert (lasting.cause, lasting.seconds, lasting.tokens_lost) == ("preemption", None, 0)
    teller.start(queued_s=40.0)
    (one,) = told(teller).each
    # 0.1 asked, 3 saved, 2 verified, 0.5 requeued, 1 ended, 40 queued, 2 resume and restart, 20 ranks, 5 rollout
    assert (one.save_s, one.queue_s, one.start_s, one.again_s) == (3.1, 40.0, 22.0, 5.0)
    assert (one.seconds, one.back) == (73.6, True)
    assert one.saved == one.resumed == "step_000001_sp0088"
    assert one.tokens_lost == 0
    assert one.began == "2026-11-01T08:01:43.000+00:00"


def test_a_save_is_counted_on_once_it_is_verified_until_the_ranks_start_from_another(teller: Teller) -> None:
    teller.preempt()
    del teller.events[-3:]  # killed before the save was read back
    assert told(teller).each[0].tokens_lost is None
    teller.say("verified", name=teller.last)
    assert told(teller).each[0].tokens_lost == 0
    teller.last = ""
    teller.start()
    assert told(teller).each[0].tokens_lost is None


def test_rollouts_that_a_start_found_lost_belong_to_the_interruption_before_it(teller: Teller) -> None:
    teller.say("crash", detail="killed")
    teller.say("warning", topic="rollouts", text="at least 8")
    teller.say("restart", number=2, resume=None)
    assert told(teller).each[0].rollouts_lost == "at least 8"


def test_event_by_event_is_as_read_back(teller: Teller) -> None:
    teller.preempt()
    teller.start()
    heard = Outages()
    for event in make_events(teller.events):
        heard.feed(event)
    assert heard.each == told(teller).each


def test_a_crash_is_mended_in_place_without_a_queue(teller: Teller) -> None:
    teller.say("hang", detail="rank 3")
    teller.say("crash", 60.0, kind="hang", detail="rank 3")
    teller.say("restart", 4.0, number=2, resume=None)
    teller.say("training", 10.0, step=0, phase="generate", index=0)
    teller.say("first_rollout", 1.0, step=0, phase="generate", index=1)
    (one,) = told(teller).each
    assert (one.cause, one.seconds, one.queue_s, one.start_s) == ("hang", 75.0, 0.0, 14.0)
    assert one.tokens_lost is None, "the micro-batches of the ranks that hung"


def test_a_lead_that_died_is_missed_from_its_last_word_on(teller: Teller) -> None:
    teller.save()
    teller.start(queued_s=500.0)
    (one,) = told(teller).each
    assert (one.cause, one.queue_s, one.seconds) == ("lead_lost", 500.0, 527.0)


def test_a_second_one_before_the_run_is_back_begins_where_the_first_ends(teller: Teller) -> None:
    teller.preempt()
    teller.start()
    del teller.events[-1]  # no new rollout: the next one came before
    teller.preempt()
    teller.start()
    first, second = told(teller).each
    assert (first.back, second.back) == (False, True)
    began, then = (datetime.fromisoformat(one.began) for one in (first, second))
    assert first.seconds == (then - began) / timedelta(seconds=1)
    assert told(teller).seconds == pytest.approx((first.seconds or 0) + (second.seconds or 0))


@pytest.mark.parametrize("cause", ["cancel", "operator", "unknown", "suspended"])
def test_what_the_user_ended_or_only_saved_is_no_interruption(teller: Teller, cause: str) -> None:
    teller.say("cause", cause=cause, evidence="")
    teller.say("ended", exit_code=23)
    teller.say("submitted", 1e6, cluster="slurm")
    teller.start()
    assert told(teller).each == []


def test_the_run_may_end_before_anything_new_was_sampled(teller: Teller) -> None:
    teller.preempt()
    teller.start()
    del teller.events[-1]
    teller.say("ended", 3.0, exit_code=0)
    (one,) = told(teller).each
    assert one.back
    assert one.seconds is not None


def test_the_last_words_of_a_fenced_attempt_change_nothing(teller: Teller) -> None:
    teller.preempt()
    teller.start()
    before = told(teller).each
    late = make_event("crash", time=datetime(2026, 12, 1, tzinfo=UTC).isoformat(), attempt=1)
    assert Outages([*make_events(teller.events), late]).each == before


@pytest.mark.parametrize("fields", [{}, {"time": "x", "attempt": 1}, {"time": "2026-12-01T08:00:00+00:00"}])
def test_an_event_without_a_time_or_an_attempt_is_passed_over(fields: dict[str, Any]) -> None:
    assert Outages([make_event("cause", cause="preemption", **fields)]).each == []


def test_a_clock_that_goes_backwards_is_no_time(teller: Teller) -> None:
    teller.preempt()
    teller.now -= timedelta(hours=1)
    teller.start()
    (one,) = told(teller).each
    assert (one.seconds, one.queue_s) == (0.0, 0.0)


def test_a_guest_is_back_where_its_training_goes_on(teller: Teller) -> None:
    """It reports no rollouts, so that no first new one ever ended its interruption."""
    teller.preempt()
    teller.start(queued_s=40.0)
    teller.events = teller.events[:-2]
    teller.say("training", 0.0, step=3, phase="step_end")
    (one,) = told(teller).each
    assert (one.back, one.start_s, one.again_s) == (True, 27.0, None)


def test_the_evidence_of_the_first_sign_is_kept_and_cut(teller: Teller) -> None:
    teller.say("hang", detail="rank 3 is silent")
    teller.say("crash", 1.0, kind="hang", detail="ended")
    teller.say("restart", 1.0, number=2, resume=None)
    teller.say("cause", 1.0, cause="preemption", evidence="x" * 5000)
    first, second = told(teller).each
    assert (first.evidence, first.attempt) == ("rank 3 is silent", 1)
    assert second.evidence == "x" * 1000
