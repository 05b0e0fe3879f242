"""`list`: a line a run, on terminals of any width, and as JSON."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.many_runs import make_run
from tests.processes import captured
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.cli.show import render
from verl_slurm.journal.steps import append_step
from verl_slurm.slurm.slurm_client import SlurmClient

Cli = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A running, a queued, a killed, a finished and a failed run."""

    async def answer(_: SlurmClient, users: set[int]) -> dict[int, tuple[str, str, str, str, str]]:
        return {1: ("RUNNING", "", "", "", ""), 2: ("PENDING", "Priority", "", "", "")}

    monkeypatch.setattr(SlurmClient, "states", answer)
    make_run(tmp_path / "run-1", job_id="1", num_events=400)
    make_run(tmp_path / "run-2", "queued", job_id="2")
    make_run(tmp_path / "run-3-killed", job_id="3")
    make_run(tmp_path / "run-4", "done", job_id="4")
    make_run(tmp_path / "run-5", "failed", job_id="5")
    return tmp_path


def test_each_run_is_a_line_with_its_state_and_what_interruptions_cost(cli: Cli, place: Path) -> None:
    result = cli("list", place)
    assert result.code == ExitCode.OK
    heading, rule, *lines = result.out.splitlines()
    assert heading.split() == (
        ["run", "job", "state", "step", "of", "reward", "checkpoint", "interrupted", "cost", "updated"]
    )
    assert set(rule) == {"─"}
    states = [re.split(r"  +", line)[:3] for line in lines]
    assert states == [
        ["run-1", "1", "running"],
        ["run-2", "2", "queued"],
        ["run-3-killed", "3", "gone"],
        ["run-4", "4", "done"],
        ["run-5", "5", "failed with 22"],
    ]
    assert "preemption" in lines[0]
    assert re.search(r"\d min( \d+ s)?  ", lines[0])
    assert "\x1b" not in result.out


def test_a_job_whose_last_start_could_not_begin_is_told_of_below_the_table(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(_: SlurmClient, users: set[int]) -> dict[int, tuple[str, str, str, str, str]]:
        said = "verl-slurm: 2099-11-27T09:00 n1: python fails: no such file"
        return {number: (state, "", "", "", said) for number, state in ((1, "RUNNING"), (2, "PENDING"))}

    monkeypatch.setattr(SlurmClient, "states", answer)
    [said] = cli("list", place).errors
    assert "run-2: job 2 waits for its next start" in said
    assert "2099-11-27T09:00 n1: python fails: no such file" in said


def test_json_has_it_as_values(cli: Cli, place: Path) -> None:
    first, second, killed, *_ = cli("list", place, "--json").json
    assert (first["state"], first["job_alive"], first["job_state"]) == ("running", True, "RUNNING")
    assert (second["state"], second["job_detail"]) == ("queued", "Priority")
    assert (killed["state"], killed["job_alive"], killed["status"]["state"]) == ("gone", False, "running")
    assert first["interruptions"]["count"] > 1
    assert first["interruptions"]["last"]["cause"] == "preemption"
    assert first["interruptions"]["last"]["queue_s"] == 40.0
    assert second["interruptions"]["last"]["seconds"] is None, "it waits still"
    assert first["checkpoint"]["name"] == first["status"]["last_checkpoint"]


def test_only_runs_in_a_state(cli: Cli, place: Path) -> None:
    def names(*words: str) -> list[str]:
        return [Path(run["run_dir"]).name for run in cli("list", place, *words, "--json").json]

    assert names("--state", "failed") == ["run-5"]
    assert names("--state", "gone", "--state", "queued") == ["run-2", "run-3-killed"]
    assert names("--state", "saving") == []
    none = cli("list", place, "--state", "saving", "--state", "canceled")
    assert (none.code, none.out) == (0, f"none of 5 runs in {place} is saving or canceled\n")


@pytest.mark.parametrize("width", [240, 120, 80, 60, 50])
def test_a_narrow_terminal_loses_columns_and_never_breaks_a_line(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Of runs, checkpoints, steps and interruptions; the first columns always stay."""
    run = make_run(place / "run-6", cluster="local", job_id="999999999", host="elsewhere")
    for step in range(1, 4):
        append_step(run, 1, {"step": float(step), "reward": 0.5, "eval/reward": 0.5, "policy_loss": 0.1})
    monkeypatch.setattr(render, "width", lambda: width)
    for words, first in ((("list", place), ["run"]), (("list", run.root), ["name", "kind"])):
        heading, *lines = cli(*words).out.splitlines()
        assert heading.split()[: len(first)] == first
        assert max(len(line) for line in (heading, *lines) if "no room for" not in line) <= width
    shown = cli("status", run.root).out.partition("\n\n")[2].splitlines()
    assert max(len(line) for line in shown if "no room for" not in line) <= width
    assert any(line.split()[:3] == ["step", "reward", "eval"] for line in shown)
    assert any(line.startswith("interrupted") for line in shown)


def test_colours_are_for_terminals_and_not_against_anyones_will(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> str:
        render.table(["run", "state"], [["a", "gone"]], colours={"gone": "red"})
        render.fields([("state", "gone; running once")], {"gone": "red"})
        return capsys.readouterr().out

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in shown()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert shown().count("\x1b[31m") == 2
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown()


def test_columns_without_room_are_named_below_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    render.table(["name", "job", "why"], [["a", "1" * 40, "one word after the other"]], first_to_go=["job"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "no room for: job (--json has them)"
    assert all(len(line) <= 30 for line in lines[2:-1])
    assert " ".join(" ".join(lines[2:-1]).split()) == "a one word after the other"


def test_slurm_that_does_not_answer_is_said_once_and_no_state_is_claimed(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(place / "nowhere"))
    result = cli("list", place)
    assert result.code == ExitCode.OK
    assert "there is no squeue here" in result.error
    assert "running?" in result.out
    assert [run["job_alive"] for run in cli("list", place, "--json").json[:2]] == [None, None]


def test_a_reader_that_has_seen_enough_ends_the_command_in_silence(place: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "verl_slurm.cli", "list", str(place), "--json"]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert done.returncode == ExitCode.PIPE
    assert "Broken" not in done.stderr


@pytest.mark.scenario("USE-SMALL")
@pytest.mark.parametrize(("cluster", "shown"), [("other", "on other"), ("here", "gone")])
def test_a_run_of_another_cluster_is_listed_with_its_cluster(
    tmp_path: Path, cluster: str, shown: str
) -> None:
    root = make_run(tmp_path / "runs" / "a", "running").root
    status = json.loads((root / "status.json").read_text())
    (root / "status.json").write_text(json.dumps(status | {"slurm": cluster}))
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, says in (("squeue", ""), ("scontrol", "ClusterName             = here")):
        (tools / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tools / name).chmod(0o755)
    argv = [sys.executable, "-m", "verl_slurm.cli", "list", str(tmp_path / "runs"), "--json"]
    done = captured(argv, env={"PATH": str(tools)}, timeout=120, check=True)
    assert json.loads(done.stdout)[0]["state"] == shown
