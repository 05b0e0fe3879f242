"""What `requeue` says of a job that cannot be requeued now, and of no job; what it does: test_submit_slurm.py."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.many_runs import Kind, make_run
from verl_slurm.cli.jobs import way_on
from verl_slurm.exit_codes import ExitCode
from verl_slurm.slurm.parse import parse_job

GOLDEN = Path(__file__).parent.parent / "slurm" / "golden"


@pytest.mark.parametrize(
    ("moment", "reason", "way"),
    [
        ("suspended", None, "scontrol resume 1"),
        ("pending", "job_requeued_in_held_state", "scontrol release 1"),
        ("pending", "JobHeldUser", "scontrol release 1"),
        ("pending", "JobHeldAdmin", "scontrol release 1"),
        ("pending", "Resources", ""),
        ("running", None, ""),
    ],
)
def test_a_job_that_stands_still_has_a_way_on(moment: str, reason: str | None, way: str) -> None:
    facts = parse_job((GOLDEN / f"{moment}.txt").read_text(), 1)
    assert way_on(msgspec.structs.replace(facts, reason=reason)) == way


@pytest.mark.parametrize("command", ["cancel", "requeue", "status", "logs"])
def test_an_unset_variable_is_not_the_run_in_the_working_directory(
    command: str, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_run(tmp_path / "run", "done").root)
    assert cli(command, "").code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("kind", "found", "way"),
    [
        ("done", "job 999999999, done", "train.steps=N` goes on"),
        ("cancelled", "job 999999999, cancelled", "` starts it again"),
        ("running", "job 999999999, GONE", "` starts it again"),
    ],
)
@pytest.mark.parametrize("command", ["cancel", "requeue"])
def test_what_became_of_a_job_that_is_over_is_said_by_the_journal(
    command: str, kind: Kind, found: str, way: str, cli: Callable[..., Any], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", kind, cluster="local", job_id="999999999", host=socket.gethostname())
    result = cli(command, run.root)
    assert result.code == ExitCode.NOT_FOUND
    assert found in result.error
    assert way in result.error
