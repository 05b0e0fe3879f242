"""On a real Slurm: the numbers outlive a preemption, and an alert makes the job of its run save."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.alert_receiver import alert, listening, post
from tests.harness import SMALL, LiveRun
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.fixture
def run(cluster: DevCluster, tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(cluster, tmp_path / "run", *SMALL, "observability.metrics_port=0", "train.steps=40")
    yield live
    live.cancel()


def page(run: LiveRun, instance: str) -> dict[tuple[str, str], float]:
    """(name, the one label's value) of every sample of a lead or an agent."""
    (file,) = run.paths.metrics.glob(f"*.{instance}.json")
    target = json.loads(file.read_bytes())[0]["targets"][0]
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, "".join(s.labels.values())): s.value for f in families for s in f.samples}


@pytest.mark.long
@pytest.mark.variant
def test_the_numbers_go_on_over_a_preemption_and_an_alert_makes_the_job_save(
    run: LiveRun, cluster: DevCluster, tmp_path: Path
) -> None:
    run.submit()
    run.wait_phase("generate")
    assert page(run, "lead")["verl_restarts_total", "preemption"] == 0
    assert page(run, "node_0001")["verl_agent_lead_link", ""] == 1
    preempt(cluster, int(run.job_id), hold_s=1)
    run.wait_event("ended", exit_code=25)
    seen = len(run.events())
    run.wait_event("first_rollout", after=seen)
    # The step is rank 0's to tell; another one may have been first with the rollout.
    run.wait(lambda: run.status().get("state") == "running" and run.status().get("step", 0) >= 1)
    after = page(run, "lead")
    assert after["verl_restarts_total", "preemption"] == 1
    assert after["verl_requeues_total", "accepted"] == 1
    assert after["verl_checkpoint_saves_total", "emergency"] == 1
    assert after["verl_run_attempt", ""] == 2
    assert after["verl_run_step", ""] >= 1
    assert 0 < after["verl_goodput_ratio", ""] <= 1

    token = tmp_path / "alerts.token"
    with listening(run.paths, token, env=run.env()) as (address, _):
        run_id = run.paths.run_id.read_text().strip()
        seen = len(run.events())
        body = alert(action="emergency_checkpoint", run_id=run_id)
        assert post(address, token.read_text(), body) == (200, {run_id: f"asked job {run.job_id}"})
    assert run.wait_event("cause", after=seen)["cause"] == "operator"
    saved = run.wait_event("saved", after=seen, emergency=True)
    run.wait_event("verified", after=seen, name=saved["name"])
    run.wait_phase("update", step=int(run.status()["step"]))
