"""Daemons that replace themselves by other processes: from Slurm 23.11 `scontrol reconfigure` does it to all."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = pytest.mark.slurm


def _cli(cluster: DevCluster, *words: str) -> dict[str, object]:
    argv = [sys.executable, "-m", "verl_slurm.cli", "devcluster", *words]
    argv += ["--dir", str(cluster.directory), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, object] = msgspec.json.decode(done.stdout)
    return answer


def _slurm(cluster: DevCluster, *argv: str) -> str:
    done = subprocess.run(
        argv, env=cluster.client_env(), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def _daemon(name: str, *words: str) -> psutil.Process:
    found = psutil.process_iter(["name", "cmdline"])
    return next(p for p in found if p.info["name"] == name and {*words} <= {*(p.info["cmdline"] or [])})


def _knows_itself(cluster: DevCluster, directory: Path) -> None:
    """Every command that asks which processes are the cluster's."""
    state = _cli(cluster, "status")
    assert state["running"], state
    assert set(state["nodes"]) == {"node1", "node2"}  # type: ignore[call-overload]
    assert "dead" not in str(state["nodes"])
    words = ["sbatch", "--parsable", "--nodes=1", "--nodelist=node1", f"--output={directory}/out"]
    job = _slurm(cluster, *words, "--wrap=exec sleep 600").strip()
    deadline = time.monotonic() + 60
    while _slurm(cluster, "squeue", "-h", "-j", job, "-o", "%T").strip() != "RUNNING":
        assert time.monotonic() < deadline
    assert _cli(cluster, "preempt", job, "--hold", "0")["seen"] == "preempt_time"
    _slurm(cluster, "scancel", job)
    assert _cli(cluster, "fail-node", "node2")["killed"]
    assert _cli(cluster, "fail-node", "--restore", "node2")["state"] == "idle"


@pytest.mark.scenario("USE12")
def test_after_scontrol_reconfigure_the_cluster_knows_itself(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    cluster = make_cluster(nodes=2, kill_wait_s=2)
    _slurm(cluster, "scontrol", "reconfigure")
    _knows_itself(cluster, tmp_path)


@pytest.mark.scenario("USE12")
def test_daemons_with_new_pids_are_known(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> None:
    """By hand what newer versions do at a reconfigure: the same command line in another process."""
    cluster = make_cluster(nodes=2, kill_wait_s=2)
    conf = str(cluster.slurm_conf)
    for name, words in (("slurmctld", ["-f", conf]), ("slurmd", ["-N", "node2", "-f", conf])):
        before = _daemon(name, *words)
        argv = before.cmdline()
        before.kill()
        before.wait(timeout=20)
        # Not run(): the background process would hold the pipe's other end.
        assert subprocess.call(argv, env=cluster.client_env(), stdout=subprocess.DEVNULL) == 0
        deadline = time.monotonic() + 60
        while "node2" not in _slurm(cluster, "sinfo", "-h", "-N", "-t", "idle"):
            assert time.monotonic() < deadline
    _knows_itself(cluster, tmp_path)
    assert _cli(cluster, "stop")["left"] == []
    assert not [p for p in psutil.process_iter(["cmdline"]) if conf in (p.info["cmdline"] or [])]
