"""Hooks of a run on a real Slurm that is preempted, requeued and done."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ONE_RANK, SMALL, LiveRun
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("ranks_without_torch")]


@pytest.fixture
def run(cluster: DevCluster, tmp_path: Path) -> Iterator[LiveRun]:
    hook = tmp_path / "hook.sh"
    hook.write_text(f'#!/bin/sh\ncat >> "{tmp_path}/$VERL_SLURM_HOOK"\n')
    hook.chmod(0o755)
    words = [f"hooks.{name}=[{hook}]" for name in ("on_checkpoint", "on_requeue", "on_end")]
    live = LiveRun(cluster, tmp_path / "run", *SMALL, *ONE_RANK, *words)
    yield live
    live.cancel()


def test_a_preempted_run_tells_of_its_checkpoints_its_requeue_and_its_end(
    run: LiveRun, tmp_path: Path
) -> None:
    run.submit()
    run.wait_phase("generate")
    preempt(run.cluster, int(run.job_id), hold_s=1)
    run.wait_event("ended", exit_code=25)
    run.wait_end()
    run.wait_slurm(lambda facts: facts.is_over)  # the lead waits for the last hook

    def told(hook: str) -> list[dict[str, object]]:
        path = tmp_path / hook
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    verified = [event["name"] for event in run.events("verified")]
    assert [event["name"] for event in told("on_checkpoint")] == verified
    assert len(verified) >= 2
    assert [event["attempt"] for event in told("on_requeue")] == [1]
    assert [(event["attempt"], event["exit"]) for event in told("on_end")] == [(2, "OK")]
    assert run.events("warning") == []
