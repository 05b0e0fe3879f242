"""The journal as memory: what it counts, what it survives."""

import time
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.attempt_start import journal_faults

from tests.journals import Line, append_event, make_event, make_events, read_events
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal import files
from verl_slurm.journal.history import History
from verl_slurm.journal.status import Status


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path)
    found.run_yaml.touch()  # without it RUN is away
    return found


def history(*lines: Line) -> History:
    return History(make_events(list(lines)))


def restart(progress: str) -> Line:
    return {"event": "restart", "progress": progress}


CRASH: Line = {"event": "crash"}


def test_events_are_read_back_in_order_with_attempt_and_job(paths: RunPaths) -> None:
    journal = Journal(paths, attempt=2, job_id="17")
    journal.write(make_event("cause", cause="preemption", evidence='says "it"\nand more'))
    journal.write(make_event("ended", exit_code=25))
    first, last = read_events(paths)
    assert (first["attempt"], first["job_id"], first["evidence"]) == (2, "17", 'says "it"\nand more')
    assert last["exit_code"] == 25


@pytest.mark.scenario("K02")
def test_an_event_is_one_line_of_the_log_with_the_time_of_day_and_the_time_that_nobody_sets(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Journal(paths, attempt=1, job_id="1").write(make_event("crash", detail="a\nb\x1b[31m\u2028c"))
    assert len(capsys.readouterr().out.splitlines()) == 1
    before = time.monotonic()
    Journal(RunPaths(tmp_path), attempt=3, job_id="7").write(make_event("restart", number=1))
    date, steady, who, *_ = capsys.readouterr().out.split()
    assert datetime.fromisoformat(date).tzinfo is not None
    assert before - 0.001 <= float(steady) <= time.monotonic() + 0.001
    assert who == "verl-slurm[3]"


def test_half_a_line_costs_that_line_alone_and_at_the_end_nothing_else(paths: RunPaths) -> None:
    journal = Journal(paths, attempt=1, job_id="1")
    journal.write(make_event("started"))
    with paths.events.open("ab") as file:
        file.write(b'{"event": "gener')
    assert [e["event"] for e in read_events(paths)] == ["started"]
    journal.write(make_event("training"))
    assert [e["event"] for e in read_events(paths)] == ["started", "training"]


def test_no_run_is_made_where_the_runs_directory_was_moved_away(paths: RunPaths) -> None:
    journal = Journal(paths, attempt=1, job_id="1")
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


def test_restarts_in_a_row_are_stuck_until_there_is_progress_or_a_new_submission() -> None:
    twice = [restart("a"), CRASH] * 2
    assert history(*twice).stuck == 2
    assert history(restart("a"), CRASH, restart("b"), CRASH).stuck == 1
    assert history(*[restart("a")] * 3).stuck == 0, "a preemption is not a crash"
    assert history(*[restart("a"), {"event": "orphaned"}] * 3).stuck == 3, (
        "a lead that is killed at each start"
    )
    assert history(*[{"event": "start_failed"}] * 2).stuck == 0, "counted, and made to wait, by themselves"
    assert history(*twice, {"event": "submitted"}).stuck == 0, "repaired, and submitted again"


def test_the_end_for_want_of_progress_has_the_words_of_the_last_crash() -> None:
    words = (
        f"{' / '.join('abcdefghi')} / OutOfMemoryError: {'x' * 500} / verl-slurm: rank 9 (local rank 1) ended"
    )
    told = [restart("a"), {**CRASH, "detail": "x"}, {**CRASH, "detail": words}, {**CRASH, "detail": ""}]
    assert history(*told, {"event": "ended", "exit_code": 25}).no_progress(Path("/r")) == (
        f"3 restarts in a row crashed without anything new; the last one: {words}; "
        "verl-slurm logs /r --rank 9 shows more; once that is corrected, `verl-slurm submit /r` goes on"
    )
    service = {"event": "cause", "cause": "service", "evidence": "judge: exit code 1"}
    said = history({**CRASH, "detail": words}, service).no_progress(Path("/r"))
    assert "judge: exit code 1; verl-slurm logs /r --all lists what each node has printed" in said


def test_time_limits_and_bad_nodes_before_training_are_counted_and_are_no_crash() -> None:
    limit = {"event": "cause", "cause": "time_limit"}
    twice = [restart("a"), limit] * 2
    assert (history(*twice).short, history(*twice).stuck) == (2, 0)
    assert history(restart("a"), {"event": "training"}, limit).short == 0
    assert history(*twice, {"event": "held", "stuck": 2}).short == 0, "released: anew"
    bad = {"event": "cause", "cause": "bad_node"}
    started = [restart("a"), bad]
    assert (history(*started * 3).unfit, history(*started * 3).stuck) == (3, 0)
    assert history(*started, {"event": "training"}, *started).unfit == 1
    assert history(*started, {"event": "submitted"}).unfit == 0


@pytest.mark.scenario("FLT-A")
def test_what_the_environment_stopped_is_counted_until_something_new_is_there() -> None:
    failed, crash = {"event": "start_failed", "detail": "x"}, {**CRASH, "kind": "environment"}
    lived = [restart("a"), failed, restart("a"), {"event": "training"}, crash, failed]
    assert history(*lived).failed_starts("7", 0) == 2
    assert history(*lived).stuck == 0
    for news in (restart("b"), {"event": "first_rollout"}, {"event": "held", "stuck": 2}):
        assert history(*lived, news, failed).failed_starts("7", 0) == 1


@pytest.mark.scenario("C01")
def test_the_snapshot_is_the_owners_alone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    old = Journal(paths, attempt=take_attempt(paths, job_id="1", restart=0).attempt, job_id="1")
    old.status(Status(step=1))
    new = Journal(paths, attempt=take_attempt(paths, job_id="2", restart=0).attempt, job_id="2")
    new.status(Status(step=7))
    old.status(Status(step=2))
    assert msgspec.json.decode(paths.status.read_bytes(), type=Status).step == 7


def test_an_attempt_that_lost_the_run_says_so_and_nothing_else_in_the_journal(tmp_path: Path) -> None:
    paths, heard = RunPaths(tmp_path), list[object]()
    journal = Journal(
        paths, attempt=take_attempt(paths, job_id="1", restart=0).attempt, job_id="1", heard=heard.append
    )
    journal.write(make_event("cause", cause="preemption"))
    take_attempt(paths, job_id="2", restart=0)
    for event in ({"event": "pruned", "name": "step_000001"}, {"event": "stranger", "reason": "no token"}):
        journal.write(make_events([event])[0])
    journal.write(make_event("fenced", exit_code=20))
    assert [event["event"] for event in read_events(paths)] == ["cause", "fenced"]
    assert len(heard) == 2


def test_a_run_without_its_run_yaml_and_its_attempts_is_not_away(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(paths, attempt=1, job_id="1")
    journal.write(make_event("crash"))
    paths.run_yaml.unlink()
    journal.write(make_event("crash"))
    assert len(read_events(paths)) == 2
    assert "away" not in capsys.readouterr().out
    paths.events.unlink()
    journal.write(make_event("crash"))
    assert "RUN is away" in capsys.readouterr().out
    assert not paths.events.exists()


def test_a_journal_that_is_cut_while_its_attempt_runs_says_so_before_the_next_event(paths: RunPaths) -> None:
    journal = Journal(paths, attempt=0, job_id="1")
    journal.write(make_event("started"))
    journal.write(make_event("restart"))
    first, _, _ = paths.events.read_text().partition("\n")
    paths.events.write_text(first + "\n")
    journal.write(make_event("training"))
    journal.write(make_event("first_rollout"))
    kinds = [one["event"] for one in read_events(paths)]
    assert kinds == ["started", "warning", "training", "first_rollout"]
    assert "was cut or replaced while attempt 0 ran" in read_events(paths)[1]["text"]


def test_a_start_says_once_what_its_journal_lacks(paths: RunPaths) -> None:
    paths.run_id.write_text("2" * 16)
    append_event(paths, "ended", exit_code=0, attempt=1)
    paths.run_id.write_text("1" * 16)
    append_event(paths, "started", attempt=3)
    foreign, lacking = faults = journal_faults(paths, files.read_events(paths), 4)
    assert f"1 line of run {'2' * 16}, not of this run ({'1' * 16})" in foreign.text
    assert "says nothing of 2 attempts (1, 2)" in lacking.text
    for fault in faults:
        files.append_event(paths, fault)
    assert journal_faults(paths, files.read_events(paths), 4) == []
