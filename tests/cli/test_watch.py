"""`watch` of many runs, and of one that was submitted again after an end; of one: test_submit_local.py."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_submit_local import LOCAL, wait_for_event
from tests.journals import append_event
from tests.many_runs import make_run
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.runs.follow import FleetWatch
from verl_slurm.slurm.slurm_client import SlurmClient

Cli = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, of which the living one ends as soon as it is waited for."""

    async def answer(_: SlurmClient, users: set[int]) -> dict[int, tuple[str, str, str, str, str]]:
        return {7: ("RUNNING", "", "", "", "")}

    monkeypatch.setattr(SlurmClient, "states", answer)
    living = make_run(tmp_path / ("a-name-that-is-longer-than-its-column" + "-1"))
    make_run(tmp_path / "over", "done")
    real = FleetWatch.look

    def look(fleet: FleetWatch) -> int:
        append_event(living, "cause", attempt=1, job_id="7", cause="preemption", evidence="\x1b[31m")
        append_event(living, "ended", attempt=1, job_id="7", exit_code=0)
        return real(fleet)

    monkeypatch.setattr(FleetWatch, "look", look)
    return tmp_path


def test_many_runs_are_counted_and_told_with_their_names(cli: Cli, place: Path) -> None:
    result = cli("watch", place)
    assert result.code == ExitCode.OK
    first, cause, ended = result.out.splitlines()
    assert first == "2 runs: 1 running, 1 done" or first == "2 runs: 1 done, 1 running"
    assert cause.startswith("…hat-is-longer-than-its-column"[0]), "the end of a name tells runs apart"
    assert "its-column-1  " in cause
    assert "PREEMPTION: \\x1b[31m" in cause
    assert "ended with 0" in ended


def test_as_json_each_event_is_a_line_with_its_run(cli: Cli, place: Path) -> None:
    head, *events = map(json.loads, cli("watch", place, "--json").out.splitlines())
    assert (head["event"], head["runs"], head["states"]) == ("watching", 2, {"running": 1, "done": 1})
    assert [event["event"] for event in events] == ["cause", "ended"]
    assert {Path(event["run_dir"]).parent for event in events} == {place}


def test_several_runs_may_be_named(cli: Cli, place: Path, tmp_path: Path) -> None:
    gone = make_run(tmp_path / "x" / "gone", cluster="local", job_id="999999999", host=socket.gethostname())
    result = cli("watch", gone.root, place / "over")
    assert result.code == ExitCode.CRASHED
    assert "said nothing more" in result.out
    assert result.out.startswith("gone  --:--:--  "), "as wide as the longest name"


def test_a_place_without_runs_is_not_waited_for(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert cli("watch", tmp_path / "empty").code == ExitCode.NOT_FOUND
    assert cli("watch", tmp_path / "nowhere").code == ExitCode.NOT_FOUND


def test_one_of_several_names_that_is_wrong_is_refused(cli: Cli, place: Path) -> None:
    result = cli("watch", place / "over", place / "ovre")
    assert result.code == ExitCode.NOT_FOUND
    assert f"{place / 'ovre'};" in result.error


@pytest.mark.slow
@pytest.mark.scenario("USE02")
def test_watch_follows_the_job_that_runs_after_an_earlier_one_was_cancelled(
    workplace: Path, cli: Cli
) -> None:
    run = workplace / "runs" / "demo"
    assert cli("submit", "config.yaml", *LOCAL).code == 0
    wait_for_event(run, "started")
    assert cli("cancel", run).code == 0
    assert cli("watch", run).code == ExitCode.CANCELLED, "over, until it is submitted again"
    assert cli("submit", "config.yaml", *LOCAL).code == 0
    words = [sys.executable, "-m", "verl_slurm.cli", "watch", str(run), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        told: list[str] = []
        for line in watch.stdout:
            told.append(json.loads(line)["event"])
            if told.count("started") == 2:
                break
        assert told.count("ended") == 1, "the end of the first job is told, and is not the run's"
        assert cli("cancel", run).code == 0
        assert '"ended"' in watch.stdout.read()
        assert watch.wait(timeout=60) == ExitCode.CANCELLED
