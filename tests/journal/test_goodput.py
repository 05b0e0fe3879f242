"""The journal added up: the same at a start as while it grows, and never fooled by what stands in it."""

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.journals import make_event
from verl_slurm.journal.events import Event
from verl_slurm.journal.folds.goodput import RESTART_CAUSES, RunNumbers

START = 1_800_000_000.0


def at(seconds: float, kind: str, /, **fields: Any) -> Event:
    return make_event(kind, time=datetime.fromtimestamp(START + seconds, UTC).isoformat(), **fields)


def life(began: float, *inner: Event, ended: float | None = None, job: str = "7") -> list[Event]:
    end = [] if ended is None else [at(ended, "ended", exit_code=25)]
    return [at(began, "started", job_id=job), *inner, *end]


def save(written: float, name: str = "step_000002", /, **fields: Any) -> list[Event]:
    facts = {"name": name, "seconds": 2.0, "num_bytes": 100, "emergency": False, "on_shared": True}
    return [at(written, "saved", **(facts | fields)), at(written + 1, "verified", name=name)]


def restarts(run: RunNumbers) -> dict[str, int]:
    return {cause: number for cause, number in run.restarts.items() if number}


def test_a_save_counts_from_when_it_was_written_and_only_once_it_was_read_back() -> None:
    saved, verified = save(10)
    run = RunNumbers([*life(0), saved])
    assert (run.last_save, run.last_durable) == (None, START + 10)
    run.feed(verified)
    assert run.last_save == START + 10
    run.feed(at(20, "saved", name="step_000004", on_shared=True))
    run.feed(at(21, "corrupt", name="step_000004"))
    assert run.last_save == START + 10


def test_a_save_that_only_the_nodes_have_was_read_back_there() -> None:
    run = RunNumbers([*life(0), save(10, on_shared=False)[0]])
    assert run.last_save == START + 10


def test_what_a_start_goes_back_to_is_the_last_save() -> None:
    older, newer = save(10, "step_000002"), save(20, "step_000004")
    run = RunNumbers([*life(0), *older, *newer])
    assert run.last_save == START + 20
    run.feed(at(30, "restart", number=2, resume="step_000002"))
    assert run.last_save == START + 10
    run.feed(at(40, "restart", number=3, resume=None))
    assert run.last_save is None


def test_saves_are_counted_by_kind_with_their_cost() -> None:
    run = RunNumbers([*life(0), *save(10), *save(20, "step_000004", emergency=True, seconds=0.5)])
    assert run.saves == {"periodic": 1, "emergency": 1}
    assert (run.save_seconds, run.save_bytes) == (2.5, 200.0)
    assert (run.last_save_seconds, run.last_save_bytes) == (0.5, 100.0)
    assert run.counts["verified"] == 2


RESTART = at(1, "restart", number=1)


@pytest.mark.parametrize(
    ("between", "cause"),
    [
        ([at(5, "cause", cause="preemption"), at(6, "ended"), at(9, "started", job_id="7")], "preemption"),
        ([at(5, "cause", cause="time_limit"), at(6, "ended"), at(9, "started", job_id="7")], "time_limit"),
        ([at(5, "cause", cause="node_lost"), at(9, "started", job_id="7")], "node_lost"),
        ([at(5, "cause", cause="failed"), at(6, "ended"), at(9, "started", job_id="8")], "node_lost"),
        ([at(5, "cause", cause="operator_requeue"), at(9, "started", job_id="7")], "requeued"),
        ([at(5, "crash", detail="x")], "crash"),
        ([at(5, "hang"), at(6, "crash", detail="x", kind="hang")], "hang"),
        ([at(6, "crash", detail="x", kind="node")], "node_lost"),
        ([at(5, "orphaned"), at(9, "started", job_id="7")], "lead_lost"),
        ([at(9, "started", job_id="7")], "lead_lost"),
        ([at(6, "ended"), at(7, "submitted", job_id="8"), at(9, "started", job_id="8")], "submitted"),
        # submit writes its word down when the lead may have begun already
        ([at(2, "submitted", job_id="7"), at(5, "crash", detail="x")], "crash"),
        ([at(5, "cause", cause="operator"), at(6, "crash", detail="x")], "crash"),
        ([at(5, "cause", cause='x"} 1\nevil 1'), at(6, "ended"), at(9, "started", job_id="7")], "other"),
    ],
)
def test_a_restart_has_the_cause_that_was_written_down(between: list[Event], cause: str) -> None:
    run = RunNumbers([*life(0), RESTART, *between])
    assert restarts(run) == {}
    run.feed(at(10, "restart", number=2))
    assert restarts(run) == {cause: 1}
    assert set(run.restarts) == set(RESTART_CAUSES)


def test_requeues_are_counted_by_their_outcome() -> None:
    run = RunNumbers([*life(0), at(1, "requeue", accepted=False), at(2, "requeue", accepted=True)])
    assert run.requeues == {"accepted": 1, "refused": 1}


def test_allocated_is_from_each_start_to_its_end_without_the_queue() -> None:
    run = RunNumbers([*life(0, ended=100), *life(1000, ended=1050), *life(2000)])
    assert run.allocated_seconds(START + 2025) == pytest.approx(175)


def test_a_start_that_ended_without_a_word_lived_until_its_last_one() -> None:
    run = RunNumbers([*life(0, at(60, "saved", name="a")), *life(1000)])
    assert run.allocated_seconds(START + 1010) == pytest.approx(70)


def test_goodput_is_of_the_steps_that_count() -> None:
    run = RunNumbers(life(0))
    assert run.goodput(START) is None
    for step, seconds in ((1, 10.0), (2, 10.0), (3, 10.0), (2, 12.0)):  # the run went back behind step 1
        run.step_took(step, seconds)
    assert run.useful_seconds == pytest.approx(22.0)
    assert run.goodput(START + 44) == pytest.approx(0.5)
    assert run.goodput(START + 11) == 1.0
    run.step_took(5, 1.0)  # a line of the log was lost
    assert run.useful_seconds == pytest.approx(23.0)


def test_told_event_by_event_or_read_back_it_is_the_same() -> None:
    events = [*life(0, RESTART, *save(10), at(20, "cause", cause="preemption"), ended=30), *life(40)]
    told = RunNumbers()
    for event in events:
        told.feed(event)
    assert vars(told) == vars(RunNumbers(events))


@pytest.mark.parametrize(
    "event",
    [
        make_event("saved"),
        make_event("saved", time="yesterday"),
        at(1, "saved", seconds=-1.0, num_bytes=5),
        at(1, "saved", seconds=1.0),
        at(1, "cause", cause=""),
        at(1, "ended", exit_code=-(1 << 53)),
    ],
)
def test_what_makes_no_sense_is_passed_over(event: Event) -> None:
    run = RunNumbers([*life(0), event])
    assert run.last_save_seconds is None
    assert restarts(run) == {}


@pytest.mark.parametrize(
    ("step", "seconds"), [(0, 1.0), (-1, 1.0), (10**12, 1.0), (1, -1.0), (1, float("inf"))]
)
def test_a_step_that_cannot_be_is_passed_over(step: int, seconds: float) -> None:
    run = RunNumbers()
    run.step_took(step, seconds)
    assert run.useful_seconds == 0.0


def test_a_run_of_many_saves_remembers_the_newest_alone() -> None:
    run = RunNumbers(life(0))
    for number in range(1000):
        for event in save(10 + number, f"step_{number:06d}"):
            run.feed(event)
    assert len(run._saved_at) <= 64
    assert run.last_save == START + 1009


def test_steps_that_are_thrown_back_are_counted_apart() -> None:
    run = RunNumbers()
    for step, seconds in ((1, 4.0), (2, 5.0), (3, 6.0), (2, 7.0)):
        run.step_took(step, seconds)
    assert (run.useful_seconds, run.repeated_seconds) == (11.0, 11.0)
