"""Cores and memory of the embedded cluster's nodes: Slurm counts both, whatever the machine has."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import captured
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = pytest.mark.slurm


def _job(cluster: DevCluster, *options: str) -> str:
    argv = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=exec sleep 600"]
    done = captured(argv, env=cluster.client_env(), timeout=60, check=True)
    return done.stdout.strip()


def _ask(cluster: DevCluster, *argv: str) -> "subprocess.CompletedProcess[str]":
    return captured(argv, env=cluster.client_env(), timeout=60)


@pytest.mark.scenario("EMB2")
def test_jobs_share_a_node_until_its_cores_or_its_memory_are_taken(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    # More than this machine has of both.
    cluster = make_cluster(nodes=1, cpus_per_node=200, mem_mb_per_node=10_000_000)
    assert _ask(cluster, "sinfo", "-h", "-o", "%c %m", "-p", "urgent").stdout.strip() == "200 10000000"
    first = _job(cluster, "--cpus-per-task=2", "--mem=6000000")
    too_much = _job(cluster, "--cpus-per-task=2", "--mem=6000000")
    beside_it = _job(cluster, "--cpus-per-task=100", "--mem=4000000")
    more_than_there_is = _job(cluster, "--cpus-per-task=201", "--mem=1")
    refused = _ask(cluster, "srun", "--mem=10000001", "true")
    assert "Memory specification can not be satisfied" in refused.stderr
    # Once the third runs, the scheduler has looked at the second and left it.
    for _ in range(1000):
        states = _ask(cluster, "squeue", "-h", "-o", "%i %T %r").stdout.splitlines()
        if f"{beside_it} RUNNING None" in states:
            break
    assert f"{first} RUNNING None" in states
    assert f"{too_much} PENDING Resources" in states
    assert f"{more_than_there_is} PENDING PartitionConfig" in states


@pytest.mark.scenario("EMB2")
def test_a_job_that_asks_for_no_memory_gets_its_cores_share(make_cluster: Callable[..., DevCluster]) -> None:
    cluster = make_cluster(nodes=1, cpus_per_node=4, mem_mb_per_node=4000)
    said = _ask(cluster, "srun", "sh", "-c", "scontrol show job $SLURM_JOB_ID").stdout
    assert "mem=1000M" in said, said
