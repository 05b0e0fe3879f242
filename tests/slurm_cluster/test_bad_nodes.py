"""Nodes that are not fit for ranks, on a real Slurm. No GPU is here: a stand-in of nvidia-smi says what is wrong."""

import os
from pathlib import Path

import pytest

from tests.fakes.nvidia_smi import install_nvidia_smi
from tests.harness import SMALL, LiveRun
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("ranks_without_torch")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a user has: a state directory, a PATH, and GPUs that Slurm gave."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return tmp_path


@pytest.mark.scenario("L18")
def test_a_bad_node_is_left_within_one_attempt_and_avoided_by_the_next_run(
    cluster: DevCluster, home: Path
) -> None:
    install_nvidia_smi(home / "bin", {"node2": "errors=3"})
    # The quick start's own device is the CPU, and no GPU is looked at then.
    words = (*SMALL, "distributed.device=auto", "train.steps=1000")
    first, second = (LiveRun(cluster, home / name, *words) for name in ("first", "second"))
    try:
        first.submit()
        cause = first.wait_event("cause", timeout_s=60)
        assert cause["cause"] == "bad_node", first.story()
        assert cause["evidence"] == "node node2: GPUs: GPU 0 had 3 uncorrected memory errors"
        ended = first.wait_event("ended")
        assert (ended["attempt"], ended["exit_code"]) == (1, 25)
        assert first.events("training") == []  # not one safe point on that node
        first.wait_event("training", attempt=2)
        agents = {name for name in first.daemons() if name.startswith("agent")}
        assert len(agents) == 2, first.story()
        assert "agent node2" not in agents, first.story()

        # Another run of the same user, which never has that node.
        first.slurm("scancel", first.job_id)  # it leaves the nodes that the other one needs
        second.submit()
        assert second.facts().excluded == "node2"
        second.wait_event("training")
        assert first.events("crash") == second.events("crash") == second.events("cause") == []
    finally:
        first.cancel()
        second.cancel()
