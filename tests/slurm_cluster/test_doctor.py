"""`verl-slurm doctor` on a real Slurm: what it asks, and a fire drill that ends a job for real."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.harness import wait_until_gone
from tests.processes import captured
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = pytest.mark.slurm


def doctor(cluster: DevCluster, place: Path, *words: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    done = captured(
        [sys.executable, "-m", "verl_slurm.cli", "doctor", "--json", *words],
        env={**os.environ, **cluster.env()},
        cwd=place,
        timeout=300,
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    by_topic: dict[str, list[dict[str, str]]] = {}
    for finding in told.get("findings", []):
        by_topic.setdefault(finding["topic"], []).append(finding)
    return done.returncode, by_topic


def test_a_fire_drill_on_two_nodes_tells_who_got_which_signal_and_leaves_nothing(
    cluster: DevCluster, tmp_path: Path
) -> None:
    code, found = doctor(cluster, tmp_path, "--nodes", "2", "--fire-drill")
    assert code == 0, found
    assert "30 s" in found["preemption"][0]["found"]
    assert found["warning"][0]["found"].startswith("USR1 reached the batch process")
    assert [f["verdict"] for f in found["warning"]] == ["good"]  # no step was warned: `scancel -b`
    assert "steps got SIGCONT, SIGTERM" in found["end"][0]["found"]
    assert "it ran again" in found["again"][0]["found"]
    assert found["ports"][0]["found"] == "2 nodes reach one another"
    assert found["python"][0]["verdict"] == "good"
    assert list(tmp_path.iterdir()) == []
    wait_until_gone("verl_slurm.checks.drill_job")


def test_a_partition_that_cannot_run_the_job_is_bad_and_nothing_is_queued(
    cluster: DevCluster, tmp_path: Path
) -> None:
    code, found = doctor(cluster, tmp_path, "--nodes", "9", "--fire-drill")
    assert code == 31
    assert "4 nodes in it, 9 asked for" in found["partition"][0]["found"]
    assert "again" not in found


@pytest.mark.scenario("P07")
def test_submit_says_before_it_queues_whether_the_grace_time_suffices(
    cluster: DevCluster, tmp_path: Path
) -> None:
    root = Path(__file__).parents[2]
    words = [
        "submit",
        str(root / "configs/quickstart.yaml"),
        f"run_dir={tmp_path / 'run'}",
        "--cluster",
        "slurm",
    ]
    words += ["--dry-run", "--json", "daemon.save_margin_s=60"]
    done = captured(
        [sys.executable, "-m", "verl_slurm.cli", *words],
        env={**os.environ, **cluster.env()},
        timeout=120,
        check=True,
    )
    told = json.loads(done.stdout)
    assert any("leaves no time for a save" in note for note in told["notes"])
    assert any(text.startswith("time limit: the warning comes 120 s") for text in told["checked"])
