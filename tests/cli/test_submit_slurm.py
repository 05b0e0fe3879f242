"""The same on a real Slurm cluster: what is queued, what is refused, and what a user asks of a job."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lines import follow_lines
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = pytest.mark.slurm
Cli = Callable[..., Any]
TEMPLATE = Path(__file__).parents[2] / "sbatch" / "multi_node.sbatch"
SLURM = ("--cluster", "slurm")


@pytest.fixture(autouse=True)
def on_the_cluster(workplace: Path, cluster: DevCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in cluster.env().items():
        monkeypatch.setenv(name, value)
    yield
    for events in workplace.rglob("events.jsonl"):
        jobs = {json.loads(line).get("job_id") for line in events.read_text().splitlines()}
        subprocess.run(["scancel", *filter(None, jobs)], check=False)


def wait_for(run: Path, event: str, times: int = 1) -> dict[str, Any]:
    """Block until the run's journal has this event so many times."""
    for line in follow_lines(run / "events.jsonl", silence_s=lambda: 60.0):
        assert line is not None, f"no {event} for a minute"
        found: dict[str, Any] = json.loads(line)
        times -= found["event"] == event
        if times == 0:
            return found
    raise AssertionError


def show_job(job_id: str) -> str:
    return subprocess.run(
        ["scontrol", "show", "job", job_id], capture_output=True, text=True, check=True
    ).stdout


def test_the_dry_run_is_the_script_that_is_queued_byte_for_byte(workplace: Path, cli: Cli) -> None:
    words = ("config.yaml", "name=demo-quick", "slurm.extra.comment=a b", "slurm.time_limit_min=5", *SLURM)
    dry = cli("submit", *words, "--dry-run")
    assert not (workplace / "runs").exists()
    assert "#SBATCH --signal=B:USR1@120" in dry.out
    assert "#SBATCH --requeue" in dry.out
    assert dry.out.splitlines()[-1].startswith("exec ")
    job_id = cli("submit", *words, "--json").json["job_id"]
    run = workplace / "runs" / "demo-quick"
    assert (run / "logs" / f"{job_id}_submission.sh").read_text() == dry.out
    wait_for(run, "ended")


def test_a_job_asks_for_what_the_config_says(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")
    job_id = cli("submit", "config.yaml", "slurm.time_limit_min=7", *SLURM, "--json").json["job_id"]
    shown = show_job(job_id)
    for field in ("JobName=demo", "Requeue=1", "NumNodes=2", "TimeLimit=00:07:00", "Partition=preemptible"):
        assert field in shown


def test_the_lead_is_the_batch_process_and_gets_its_signal(workplace: Path, cli: Cli) -> None:
    job_id = cli("submit", "config.yaml", *SLURM, "--json").json["job_id"]
    run = workplace / "runs" / "demo"
    wait_for(run, "started")
    assert cli("status", run, "--json").json["job_state"] == "RUNNING"
    subprocess.run(["scancel", "-b", "-s", "USR1", job_id], check=True)
    assert wait_for(run, "cause")["cause"] == "SIGUSR1"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["slurm.partition=nosuch"], "no such partition: nosuch"),
        (
            ["slurm.partition=urgent", "distributed.nodes=9", "distributed.dp_size=9"],
            "4 nodes in it, 9 asked for",
        ),
        (["slurm.partition=urgent", "slurm.time_limit_min=9999"], "at most 1440 min a job, 9999 asked for"),
        (["slurm.partition=urgent", "slurm.cpus_per_node=64"], "8 CPUs in it, 2 x 64 asked for"),
    ],
    ids=["partition", "nodes", "time", "cpus"],
)
def test_what_slurm_cannot_run_is_refused_and_leaves_nothing(
    workplace: Path, cli: Cli, words: list[str], part: str
) -> None:
    result = cli("submit", "config.yaml", *words, *SLURM)
    assert result.code == ExitCode.SLURM_REFUSED
    assert part in result.error
    assert "sinfo" in result.error or "scontrol show partition" in result.error
    assert not (workplace / "runs").exists()


def test_a_refused_resubmission_leaves_the_run_as_it_was(workplace: Path, cli: Cli) -> None:
    cli("submit", "config.yaml", "name=demo-quick", *SLURM, "--wait")
    run = workplace / "runs" / "demo-quick"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = cli("submit", "config.yaml", "name=demo-quick", "slurm.extra.constraint=nosuch", *SLURM)
    assert result.code == ExitCode.SLURM_REFUSED
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_list_asks_slurm_what_lives(workplace: Path, cli: Cli) -> None:
    cli("submit", "config.yaml", "name=a", *SLURM)
    cli("submit", "config.yaml", "name=waits", "slurm.extra.begin=now+3600", *SLURM)
    cli("submit", "config.yaml", "name=over-quick", *SLURM, "--wait")
    cli("submit", "config.yaml", "name=killed-mute", *SLURM, "--wait")
    wait_for(workplace / "runs" / "a", "started")
    listed = cli("list", "--json").json
    assert {Path(run["run_dir"]).name: (run["state"], run["job_state"]) for run in listed} == {
        "a": ("starting", "RUNNING"),
        "waits": ("queued", "PENDING"),
        "over-quick": ("done", None),
        "killed-mute": ("gone", None),
    }
    assert next(run for run in listed if run["run_dir"].endswith("waits"))["job_detail"] == "BeginTime"
    for name in ("a", "waits"):
        cli("cancel", workplace / "runs" / name)


def test_a_job_that_is_cancelled_while_it_waits_ends_the_waiting(workplace: Path, cli: Cli) -> None:
    cli("submit", "config.yaml", "slurm.extra.begin=now+3600", *SLURM)
    run = workplace / "runs" / "demo"
    again = cli("submit", "config.yaml", *SLURM)
    assert again.code == ExitCode.FENCED
    assert "PENDING" in again.error
    cli("cancel", run)
    result = cli("watch", run)
    assert result.code == ExitCode.CANCELLED
    assert "CANCELLED" in result.out


def test_the_sbatch_template_runs_the_same_job_without_submitit_and_cancel_ends_it(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = workplace / "bin" / "verl-slurmd"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m verl_slurm_daemon "$@"\n')
    shim.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    prepared = cli("submit", "config.yaml", "slurm.partition=preemptible", *SLURM, "--prepare-only")
    command = prepared.out.splitlines()[-1].split()
    assert str(TEMPLATE) in command
    assert command[0] == "sbatch"
    subprocess.run(command, check=True)
    run = workplace / "runs" / "demo"
    started = wait_for(run, "started")
    shown = show_job(started["job_id"])
    cancelled = cli("cancel", run)
    assert cancelled.code == 0, cancelled.err
    wait_for(run, "ended")
    for field in ("JobName=demo", "Requeue=1", "NumNodes=2", "TimeLimit=01:00:00"):
        assert field in shown
    assert "the stub lead prints" in cli("logs", run).out
