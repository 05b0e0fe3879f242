"""The journal as memory: what it counts, what it survives."""

import time
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from verl_slurm_daemon.journal import Journal

from tests.journals import make_event, make_events, read_events
from verl_slurm.base.fence import take_epoch
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.folds.progress import (
    failed_starts,
    no_progress,
    short_starts,
    stuck_restarts,
    unfit_starts,
)
from verl_slurm.journal.status import Status


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path)
    found.run_yaml.touch()  # without it RUN is away
    return found


def restart(progress: str) -> dict[str, object]:
    return {"event": "restart", "progress": progress}


CRASH = {"event": "crash"}


def test_events_are_read_back_in_order_with_epoch_and_job(paths: RunPaths) -> None:
    journal = Journal(paths, epoch=2, job_id="17")
    journal.write(make_event("cause", cause="preemption", evidence='says "it"\nand more'))
    journal.write(make_event("ended", exit_code=25))
    first, last = read_events(paths)
    assert (first["attempt"], first["job_id"], first["evidence"]) == (2, "17", 'says "it"\nand more')
    assert last["exit_code"] == 25


def test_one_event_stays_one_line_of_the_log(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    Journal(paths, epoch=1, job_id="1").write(make_event("crash", detail="a\nb\x1b[31m\u2028c"))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_last_line_cut_by_a_power_loss_is_left_out(paths: RunPaths) -> None:
    Journal(paths, epoch=1, job_id="1").write(make_event("started"))
    with paths.events.open("ab") as file:
        file.write(b'{"event": "gener')
    assert [e["event"] for e in read_events(paths)] == ["started"]


def test_no_run_is_made_where_the_runs_directory_was_moved_away(paths: RunPaths) -> None:
    journal = Journal(paths, epoch=1, job_id="1")
    aside = paths.root.with_name("aside")
    paths.root.rename(aside)
    paths.root.mkdir()  # as a mount point is there
    journal.write(make_event("started"))
    journal.status(Status(attempt=1, job_id="1"))
    assert not list(paths.root.iterdir())
    paths.root.rmdir()
    aside.rename(paths.root)
    journal.write(make_event("training"))
    assert [e["event"] for e in read_events(paths)] == ["training"]


def test_half_a_line_costs_that_line_alone(paths: RunPaths) -> None:
    journal = Journal(paths, epoch=1, job_id="1")
    journal.write(make_event("started"))
    with paths.events.open("ab") as file:
        file.write(b'{"event": "gener')
    journal.write(make_event("training"))
    assert [e["event"] for e in read_events(paths)] == ["started", "training"]


def test_crashes_at_the_same_place_are_counted() -> None:
    assert stuck_restarts(make_events([restart("a"), CRASH, restart("a"), CRASH])) == 2


def test_the_end_for_want_of_progress_has_the_words_of_the_last_crash() -> None:
    crash = {**CRASH, "detail": "a\nb\nnode n1: CondaError\nslurm.setup[0] failed"}
    told = make_events([restart("a"), crash, {"event": "ended", "exit_code": 25}])
    assert no_progress(told, 4, "verl-slurm logs /r") == (
        "4 restarts in a row crashed without anything new; the last one: b / node n1: CondaError / "
        "slurm.setup[0] failed; verl-slurm logs /r shows more"
    )
    service = {"event": "cause", "cause": "service", "evidence": "judge: exit code 1"}
    assert "the last one: judge: exit code 1;" in no_progress(make_events([crash, service]), 4, "x")


def test_progress_forgives_earlier_crashes() -> None:
    assert stuck_restarts(make_events([restart("a"), CRASH, restart("b"), CRASH])) == 1


def test_a_preemption_is_not_a_crash() -> None:
    assert stuck_restarts(make_events([restart("a"), restart("a"), restart("a")])) == 0


def test_a_lead_that_is_killed_at_each_start_is_counted() -> None:
    assert stuck_restarts(make_events([restart("a"), {"event": "orphaned"}] * 3)) == 3
    assert (
        stuck_restarts(make_events([{"event": "start_failed"}] * 2)) == 0
    )  # counted, and made to wait, by themselves


def test_a_time_limit_before_the_ranks_train_is_counted_and_is_no_crash() -> None:
    limit = {"event": "cause", "cause": "time_limit"}
    twice = make_events([restart("a"), limit, restart("a"), limit])
    assert (short_starts(twice), stuck_restarts(twice)) == (2, 0)
    assert short_starts(make_events([restart("a"), {"event": "training"}, limit])) == 0
    assert short_starts([*twice, *make_events([{"event": "held", "stuck": 2}])]) == 0, "released: anew"


@pytest.mark.scenario("FLT-A")
def test_what_the_environment_stopped_is_counted_until_something_new_is_there() -> None:
    failed, crash = {"event": "start_failed", "detail": "x"}, {**CRASH, "kind": "environment"}
    lived = [restart("a"), failed, restart("a"), {"event": "training"}, crash, failed]
    assert failed_starts(make_events(lived), "7", 0) == 2
    assert stuck_restarts(make_events(lived)) == 0
    for news in (restart("b"), {"event": "first_rollout"}, {"event": "held", "stuck": 2}):
        assert failed_starts(make_events([*lived, news, failed]), "7", 0) == 1


def test_what_was_mended_and_submitted_again_is_counted_afresh() -> None:
    assert (
        stuck_restarts(make_events([restart("a"), CRASH, restart("a"), CRASH, {"event": "submitted"}])) == 0
    )


@pytest.mark.scenario("K02")
def test_a_line_carries_the_time_of_day_and_the_time_that_nobody_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = time.monotonic()
    Journal(RunPaths(tmp_path), epoch=3, job_id="7").write(make_event("restart", number=1))
    date, steady, who, *_ = capsys.readouterr().out.split()
    assert datetime.fromisoformat(date).tzinfo is not None
    assert before - 0.001 <= float(steady) <= time.monotonic() + 0.001
    assert who == "verl-slurm[3]"


@pytest.mark.scenario("C01")
def test_the_snapshot_is_the_owners_alone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    old = Journal(paths, epoch=take_epoch(paths, job_id="1", restart=0).epoch, job_id="1")
    old.status(Status(step=1))
    new = Journal(paths, epoch=take_epoch(paths, job_id="2", restart=0).epoch, job_id="2")
    new.status(Status(step=7))
    old.status(Status(step=2))
    assert msgspec.json.decode(paths.status.read_bytes(), type=Status).step == 7


def test_attempts_that_met_bad_nodes_are_counted_until_one_trains() -> None:
    bad = {"event": "cause", "cause": "bad_node"}
    started = [restart("a"), bad]
    assert unfit_starts(make_events(started * 3)) == 3
    assert stuck_restarts(make_events(started * 3)) == 0
    assert unfit_starts(make_events([*started, {"event": "training"}, *started])) == 1
    assert unfit_starts(make_events([*started, {"event": "submitted"}])) == 0


def test_an_attempt_that_lost_the_run_says_so_and_nothing_else_in_the_journal(tmp_path: Path) -> None:
    paths, heard = RunPaths(tmp_path), list[object]()
    journal = Journal(
        paths, epoch=take_epoch(paths, job_id="1", restart=0).epoch, job_id="1", heard=heard.append
    )
    journal.write(make_event("cause", cause="preemption"))
    take_epoch(paths, job_id="2", restart=0)
    for event in ({"event": "pruned", "name": "step_000001"}, {"event": "stranger", "reason": "no token"}):
        journal.write(make_events([event])[0])
    journal.write(make_event("fenced", exit_code=20))
    assert [event["event"] for event in read_events(paths)] == ["cause", "fenced"]
    assert len(heard) == 2
