"""What `requeue` says of a job that cannot be requeued now, and of no job; what it does: test_submit_slurm.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.many_runs import make_run
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
