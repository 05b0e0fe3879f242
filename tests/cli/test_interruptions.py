"""What `status` says of a run's interruptions."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.journals import append_event, make_events
from tests.many_runs import make_run
from verl_slurm.cli.show.render import span
from verl_slurm.cli.show.run_tables import interruption_words, interruptions_table
from verl_slurm.journal.files import read_history
from verl_slurm.journal.history import History, Outage, interruption_facts
from verl_slurm.runs.glance import Glance

Cli = Callable[..., Any]
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
BACK = Outage(
    cause="preemption",
    began="2026-11-21T11:00:00+00:00",
    seconds=73.6,
    back=True,
    save_s=3.1,
    queue_s=40.0,
    start_s=22.0,
    again_s=5.0,
    saved="step_000004_sp0047",
    resumed="step_000004_sp0047",
)
CRASH = Outage(
    cause="crash", began="2026-11-21T11:30:00+00:00", seconds=20.0, back=True, queue_s=0.0, resumed=""
)
LASTING = Outage(cause="node_lost", began="2026-11-21T11:59:00+00:00")


def words(*each: Outage) -> str:
    return interruption_words(interruption_facts(each, NOW))


def test_the_sum_is_a_sentence() -> None:
    assert words() == "never"
    assert words(BACK) == "once (preemption): 1 min 14 s in all, 40 s of it in the queue; no token was lost"
    assert words(BACK, BACK, CRASH) == (
        "3 times (2x preemption, 1x crash): 2 min 47 s in all, 1 min 20 s of it in the queue; "
        "1 without a save to go on from, finished rollouts are in the ledger"
    )

    waiting = msgspec.structs.replace(LASTING, saved="step_000004", verified=True)
    assert words(waiting).endswith("no token was lost"), "a verified save waits for its resume"
    lost = msgspec.structs.replace(CRASH, rollouts_lost="at least 8 finished responses")
    assert words(BACK, lost).endswith(
        "1 without a save to go on from, 1 of these also lost finished rollouts"
    )
    assert interruptions_table([lost], NOW)["tokens lost"] == ["finished ones, too"]


def test_nothing_was_done_again_for_ranks_that_had_not_trained() -> None:
    facts = {"attempt": 1, "job_id": "1", "time": NOW.isoformat()}
    told = [
        {"event": "started", "cluster": "slurm", "host": "n", "requeues": 0},
        {"event": "restart", "number": 1, "resume": None, "progress": "start+0"},
        {"event": "crash", "detail": "slurm.setup[0] failed"},
    ]
    outages = History(make_events([facts | event for event in told])).outages
    # Beside one that struck ranks at work, which had saved.
    said = interruption_words(interruption_facts([BACK, *outages], NOW, has_ledger=False))
    assert said.endswith("; no token was lost while the ranks trained")


def test_status_tells_of_a_checkpoint_that_is_gone_and_list_calls_it_lost(cli: Cli, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "done")
    name = cli("status", paths.root, "--json").json["checkpoint"]["name"]
    assert "is gone" not in cli("status", paths.root).out
    assert "LOST" not in cli("list", tmp_path).out
    shutil.rmtree(paths.checkpoints / name)
    said = f"{name} was verified and is gone: the run goes back to"
    assert said in " ".join(cli("status", paths.root).out.split())
    assert f"LOST {name}" in cli("list", tmp_path).out
    assert said in " ".join(cli("list", paths.root).err.split())


def test_a_verified_save_that_is_gone_before_its_resume_is_not_counted_on(cli: Cli, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "queued")
    assert "no token was lost" in cli("status", paths.root).out
    (*_, newest) = sorted(paths.checkpoints.iterdir())
    shutil.rmtree(newest)
    assert "without a save to go on from" in cli("status", paths.root).out


def test_status_repeats_what_the_last_starts_found_lost_until_the_run_is_done_or_past_it(
    cli: Cli, tmp_path: Path
) -> None:
    paths = make_run(tmp_path / "run", "failed")
    append_event(paths, "warning", topic="rollouts", text="at least 8 finished responses")
    for step in (3, 900):
        append_event(paths, "warning", topic="checkpoint", text=f"step_{step:06d} was verified and is gone")
    shown = cli("status", paths.root).out
    assert "WARNING, at least 8 finished responses" in shown
    assert "WARNING, step_000900" in shown
    assert "step_000003" not in shown
    append_event(paths, "ended", exit_code=0)
    shown = cli("status", paths.root).out
    assert "done" in shown
    assert "WARNING" not in shown


def test_a_loop_without_a_ledger_is_told_of_none() -> None:
    facts = interruption_facts([CRASH], NOW, has_ledger=False)
    assert interruption_words(facts).endswith("what came after the last checkpoint was done again")
    table = interruptions_table([BACK, CRASH], NOW, has_ledger=False)
    assert table["tokens lost"] == ["0", "not known"]


def test_one_that_lasts_counts_with_its_time_so_far() -> None:
    facts = interruption_facts([LASTING], NOW)
    assert (facts["seconds"], facts["tokens_lost"], facts["each"][0]["lasts"]) == (60.0, None, True)
    assert interruption_facts([LASTING], NOW + timedelta(hours=1))["seconds"] == 3660.0
    run = Glance(root=Path(), interrupted_s=5.0, last_interruption=msgspec.to_builtins(LASTING))
    listed = (run, msgspec.structs.replace(run, last_interruption={"cause": "?", "began": "?"}))
    assert [one.cost_s > 5.0 for one in listed] == [True, False]


def test_each_is_a_line_with_its_parts() -> None:
    table = interruptions_table([BACK, CRASH, LASTING], NOW)
    lines = [list(line) for line in zip(*table.values(), strict=True)]
    assert list(table)[1:] == [
        "cause",
        "cost",
        "save",
        "queue",
        "start",
        "again",
        "tokens lost",
        "resumed from",
    ]
    assert lines[0][1:] == [
        "preemption",
        "1 min 14 s",
        "3.1 s",
        "40 s",
        "22 s",
        "5.0 s",
        "0",
        "step_000004_sp0047",
    ]
    assert lines[1][1:] == ["crash", "20 s", "-", "0.0 s", "-", "-", "unfinished ones", "the beginning"]
    assert lines[2][1:3] == ["node lost", "1 min so far"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.26, "0.3 s"),
        (59.7, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_a_span_is_said_in_two_units_at_most(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_status_tells_what_happened_and_what_each_interruption_cost(cli: Cli, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "done", num_events=700)
    out = cli("status", paths.root).out
    times = cli("status", paths.root, "--json").json["interruptions"]
    assert times["tokens_lost"] == 0
    assert f"{times['count']} times (preemption)" in out
    assert "no token was lost" in out
    assert "JobState=" not in out
    assert out.count("step_000300_sp0088") == 1
    assert len(times["each"]) == times["count"] > 5
    table = [line for line in out.splitlines() if " preemption  " in line]
    assert len(table) == 5
    few = cli("status", paths.root, "--interruptions", 0).out
    assert (" preemption  " in few, "last cause   " in few) == (False, True)


def test_status_says_why_no_requeue_came_and_what_the_newest_crash_said(cli: Cli, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", num_events=400)
    newest = read_history(paths).attempts[-1]
    append_event(paths, "warning", topic="requeue", text="not requeued: the save failed")
    append_event(paths, "crash", attempt=newest.number, job_id=newest.event.job_id, detail="KeyError: 'a'")
    said = cli("status", paths.root).out
    assert "requeue      WARNING, not requeued: the save failed\n" in said
    assert " crash " in said
    assert "last cause   KeyError: 'a'\n" in said
    append_event(paths, "requeue_asked")
    assert "not requeued" not in cli("status", paths.root).out


def test_a_requeued_run_is_not_back_at_step_0(cli: Cli, tmp_path: Path) -> None:
    """The new lead's snapshot, before its ranks have said anything."""
    paths = make_run(tmp_path / "run", "queued", cluster="local", host="elsewhere")
    step = cli("status", paths.root, "--json").json["checkpoint"]["step"]
    paths.status.write_text('{"state": "starting", "step": 0, "steps": 5000, "phase": ""}')
    assert f"step {step}/5000" in cli("status", paths.root).out
    assert cli("status", paths.root, "--json").json["step"] == step


def test_a_snapshot_that_outlived_its_lead_is_not_believed(cli: Cli, tmp_path: Path) -> None:
    import socket

    paths = make_run(tmp_path / "run", cluster="local", job_id="999999999", host=socket.gethostname())
    out = cli("status", paths.root).out
    assert "gone; running when its daemon last said so" in out
    append_event(paths, "ended", attempt=1, job_id="999999999", exit_code=0)
    assert "gone; " not in cli("status", paths.root).out
