"""`watch` of a run that was submitted again after an end: the newest job decides."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lines import follow_lines
from verl_slurm.base.exit_codes import ExitCode

pytestmark = pytest.mark.slow

Cli = Callable[..., Any]
LOCAL = ("--cluster", "local")


def wait_for_event(run: Path, event: str) -> None:
    """Block until the run's journal has this event."""
    for line in follow_lines(run / "events.jsonl", silence_s=lambda: 60.0):
        assert line is not None, f"no {event} for a minute"
        if json.loads(line)["event"] == event:
            return


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
