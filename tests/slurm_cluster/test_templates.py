"""The batch scripts in `sbatch/`: accepted by a real Slurm, and those that need no container runtime run."""

import os
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, SMALL, LiveRun, same_weights
from tests.processes import captured
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]

TEMPLATES = sorted((ROOT / "sbatch").glob("*.sbatch"))
SHORT = (*SMALL, "train.steps=2", "checkpoint.every_steps=2")
LONGER = (*SMALL, "train.steps=10", "checkpoint.every_steps=100", "checkpoint.runtime_every_steps=100")
"""Enough to be preempted in: Slurm may need seconds for that."""


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


@pytest.mark.parametrize("template", TEMPLATES, ids=names(TEMPLATES))
def test_a_real_sbatch_accepts_each_template(template: Path, cluster: DevCluster) -> None:
    # Of a heterogeneous job Slurm 22.05 plans each component by itself, and says the same on both lines.
    done = captured(
        ["sbatch", "--test-only", str(template), "/run"], env={**os.environ, **cluster.client_env()}
    )
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


def sbatch(run: LiveRun, *words: str) -> None:
    run.cli("submit", *run.argv, "--prepare-only")
    *options, template = words
    path = str(ROOT / "sbatch" / template)
    argv = ["sbatch", "--parsable", "--output=/dev/null", *options, path, str(run.paths.root)]
    run.job_id = run.slurm(*argv).strip()


def test_one_node_holds_all_ranks(cluster: DevCluster, tmp_path: Path) -> None:
    run = LiveRun(cluster, tmp_path / "run", *SHORT, "distributed.nodes=1")
    sbatch(run, "single_node.sbatch")
    run.wait_end()


@pytest.mark.scenario("L14")
def test_a_heterogeneous_job_has_ranks_in_each_component_and_survives_a_requeue(
    cluster: DevCluster, tmp_path: Path
) -> None:
    run = LiveRun(cluster, tmp_path / "run", *SHORT)
    sbatch(run, "heterogeneous.sbatch")
    run.wait_event("training")
    assert len({process.environ()["SLURMD_NODENAME"] for process in run.ranks()}) == 2
    run.slurm("scontrol", "requeue", run.job_id)
    run.wait_event("started", requeues=1)
    run.wait_end()
    assert len(run.events("started")) == 2


@pytest.mark.soak
@pytest.mark.scenario("L07", "L14")
def test_a_chain_goes_on_with_its_next_job_where_slurm_may_not_requeue(
    cluster: DevCluster, tmp_path: Path
) -> None:
    twin = LiveRun(cluster, tmp_path / "twin", *LONGER).submit()
    twin.wait_end()
    run = LiveRun(cluster, tmp_path / "run", *LONGER)
    sbatch(run, "--array=1-2%1", "chain.sbatch")
    try:
        first = run.wait_event("started")
        run.wait_phase("generate", step=1)
        preempt(cluster, int(first["job_id"]), hold_s=1)
        run.wait_event("ended", exit_code=24)
        run.wait_end()
    finally:
        run.cancel()
    jobs = [event["job_id"] for event in run.events("started")]
    assert len(set(jobs)) == 2
    assert [event["exit_code"] for event in run.events("ended")] == [24, 0]
    same, said = same_weights(run.paths.root, twin.paths.root)
    assert same, said


@pytest.mark.scenario("L07")
@pytest.mark.variant
def test_a_job_that_may_not_be_requeued_is_followed_by_another(cluster: DevCluster, tmp_path: Path) -> None:
    run = LiveRun(cluster, tmp_path / "run", *LONGER)
    sbatch(run, "--no-requeue", "multi_node.sbatch")
    run.wait_phase("generate", step=1)
    preempt(cluster, int(run.job_id), hold_s=1)
    followed = run.wait_event("successor")
    assert followed["after"] == run.job_id
    run.job_id = followed["job_id"]
    try:
        run.wait_end()
    finally:
        run.cancel()
    assert [event["job_id"] for event in run.events("started")] == [followed["after"], followed["job_id"]]
    assert any(event["resume"] for event in run.events("restart"))


def test_agents_outside_start_their_ranks_in_the_image_by_the_runtime(
    cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for Apptainer notes its words, drops all variables, and runs what stands behind the image.

    Debian has no Apptainer of this release; the real one is run by `test_containers.py` where there is one.
    """
    stand_in, image = tmp_path / "bin" / "apptainer", tmp_path / "x.sif"
    image.write_bytes(b"image")
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/bash\necho "$@" | head -1 >>{tmp_path}/said\n'
        f'while [[ $1 != {image} ]]; do shift; done\nshift\nexec env -i PATH=/usr/bin:/bin "$@"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    container = f"slurm.container={{image: {image}, binds: [/opt], python: {sys.executable}}}"
    run = LiveRun(cluster, tmp_path / "run", *SHORT, container)
    try:
        run.submit()
        run.wait_end()
    finally:
        run.cancel()
    said = (tmp_path / "said").read_text().splitlines()
    assert len(said) == 2  # one container a node
    for line in said:
        assert line.startswith("exec --cleanenv --no-home --bind=")
        assert f" --bind={run.paths.root}:{run.paths.root}:rw " in line
        assert " --bind=/opt:/opt:rw " in line
        assert f" {image} {sys.executable} -P -c import sys" in line
