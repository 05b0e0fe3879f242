"""Files of another run in the place of a run's own: each is named and none is believed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.journals import append_event
from tests.many_runs import make_run
from verl_slurm.api import Run
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import read_events, read_history
from verl_slurm.journal.status import read_status
from verl_slurm.journal.steps import append_step, every_row, last_steps
from verl_slurm.report.gather import gather
from verl_slurm.runs.follow import follow_run
from verl_slurm.slurm.slurm_client import SlurmClient

Cli = Callable[..., Any]
OWN, OTHER = "1" * 16, "2" * 16


def bound(paths: RunPaths, number: str) -> RunPaths:
    """The run, with `number` as its id and in its files."""
    paths.run_id.write_text(number + "\n")
    for path in (paths.events, paths.status):
        lines = [json.loads(line) | {"run": number} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


@pytest.fixture
def other(tmp_path: Path) -> RunPaths:
    return bound(make_run(tmp_path / "other", "done", cluster="local", job_id="8"), OTHER)


@pytest.fixture
def run(tmp_path: Path, other: RunPaths, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run that was killed, and whose journal was replaced by that of a done one."""

    async def answer(_: SlurmClient, users: set[int]) -> dict[int, tuple[str, str, str, str, str]]:
        return {}

    monkeypatch.setattr(SlurmClient, "states", answer)
    paths = bound(make_run(tmp_path / "own", cluster="local", job_id="999999999"), OWN)
    take_attempt(paths, job_id="999999999", restart=0)
    shutil.copy(other.events, paths.events)
    return paths


def test_the_end_in_the_journal_of_another_run_is_believed_by_no_command(
    cli: Cli, run: RunPaths, other: RunPaths
) -> None:
    named = f"{run.events} has {len(read_events(other))} lines of run {OTHER}, not of this run ({OWN})"
    shown = cli("status", run.root)
    assert f"WARNING, {named}" in " ".join(shown.out.split())
    assert "done" not in shown.out
    listed = cli("list", run.root.parent)
    assert named in listed.err
    assert {one["run_dir"]: one["state"] for one in cli("list", run.root.parent, "--json").json} == {
        str(run.root): "gone",
        str(other.root): "done",
    }
    watched = cli("watch", run.root)
    assert watched.code != ExitCode.OK
    assert named in watched.out
    assert "all steps are done" not in watched.out
    assert any(named in warning.text for warning in gather([run]).runs[0].warnings)


def test_a_program_that_waits_is_told_of_the_other_run_and_gets_no_end_of_it(run: RunPaths) -> None:
    told: list[ev.Event] = []
    assert follow_run(run, 0, told.append) != ExitCode.OK
    assert [type(event) for event in told] == [ev.Foreign, ev.Gone]
    assert [type(event) for event in Run(run.root).events()] == [ev.Foreign]


def test_what_the_run_itself_writes_behind_lines_of_another_one_counts(run: RunPaths) -> None:
    append_event(run, "started", attempt=2, job_id="9", cluster="local")
    foreign, started = read_events(run)
    assert (foreign.run, started.run) == (OTHER, OWN)
    history = read_history(run)
    assert history.job is not None
    assert (history.job.job_id, len(history.attempts)) == ("9", 1)


def test_a_journal_that_is_cut_while_it_is_followed_is_followed_on_and_said(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", cluster="local", job_id="7")
    lines, told = paths.events.read_bytes().splitlines(keepends=True), list[str]()

    def cut(event: ev.Event) -> None:
        told.append(event.text if isinstance(event, ev.Warned) else type(event).__name__)
        if len(told) == len(lines):
            paths.events.write_bytes(b"".join(lines[:3]))
            append_event(paths, "ended", exit_code=0, attempt=1)
            append_event(paths, "submitted", cluster="local", job_id="7")
        elif len(told) > len(lines) and "cut or replaced" in told[-1]:
            append_event(paths, "ended", exit_code=0, attempt=1)

    assert follow_run(paths, 0, cut) == ExitCode.OK
    warning, last = told[len(lines) :]
    assert f"{paths.events} was cut or replaced while it was followed" in warning
    assert last == "Ended"


def test_a_snapshot_and_steps_of_another_run_are_named_and_none_of_this_one(
    cli: Cli, run: RunPaths, other: RunPaths
) -> None:
    append_step(run, 1, {"step": 1.0, "reward": 0.25})
    append_step(other, 1, {"step": 7.0, "reward": 0.75})
    with run.steps.open("ab") as file:
        file.write(other.steps.read_bytes())
    shutil.copy(other.status, run.status)
    unread: list[str] = []
    assert read_status(run, unread) == {}
    assert [row["step"] for row in last_steps(run, 5, unread)] == [1.0]
    assert [row["step"] for row in every_row(run)] == [1.0]
    assert unread == [
        f"status.json is of another run ({OTHER}), and was passed over",
        f"steps.jsonl has 1 row of another run ({OTHER}), which were passed over",
    ]
    assert set(unread) < set(cli("status", run.root, "--json").json["journal"])
