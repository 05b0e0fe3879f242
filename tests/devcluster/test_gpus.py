"""GPUs of the embedded cluster: the machine's own, or counted ones."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.processes import captured
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.conf import ClusterOptions, deal_gpus
from verl_slurm.slurm.devcluster.machine import real_gpus

COUNTED = Path("/c/gpus")


@pytest.mark.parametrize(
    ("gpus", "machine", "dealt"),
    [
        ("auto", 0, {}),
        ("auto", 1, {"node1": ["/dev/nvidia0"]}),
        ("auto", 3, {"node1": ["/dev/nvidia0", "/dev/nvidia2"], "node2": ["/dev/nvidia1"]}),
        (0, 8, {}),
        (1, 2, {"node1": ["/dev/nvidia0"], "node2": ["/dev/nvidia1"]}),
        (1, 1, {"node1": ["/c/gpus/node1-gpu0"], "node2": ["/c/gpus/node2-gpu0"]}),
    ],
)
@pytest.mark.scenario("GPU2")
def test_gpus_are_dealt_out_and_no_two_nodes_share_one(
    gpus: object, machine: int, dealt: dict[str, list[str]]
) -> None:
    options = msgspec.convert({"nodes": 2, "gpus": gpus}, ClusterOptions)
    found = deal_gpus(options, [f"/dev/nvidia{number}" for number in range(machine)], COUNTED)
    assert {name: list(files) for name, files in found.items()} == dealt


def test_the_machines_gpus_are_found_by_number(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).write_text("")
    assert real_gpus(tmp_path) == [str(tmp_path / "nvidia2"), str(tmp_path / "nvidia10")]


@pytest.fixture
def place(short_dir: Path) -> Iterator[Path]:
    yield short_dir
    DevCluster(short_dir).stop()


def _cli(*words: str) -> str:
    argv = [sys.executable, "-m", "verl_slurm.cli", "devcluster", *words]
    done = captured(argv, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slurm
@pytest.mark.scenario("GPU2")
def test_gpus_that_are_not_there_are_granted_and_said_to_be_counted(place: Path) -> None:
    each = len(real_gpus()) + 1
    said = _cli("start", "--dir", str(place), "--nodes", "2", "--gpus", str(each))
    assert f"counted and not there: {each} on node1, {each} on node2" in said
    cluster = DevCluster(place)
    probe = 'echo "$SLURM_GPUS_ON_NODE ${CUDA_VISIBLE_DEVICES-none}"'
    argv = ["srun", "--nodes=2", f"--gpus-per-node={each}", "sh", "-c", probe]
    done = captured(argv, env=cluster.client_env(), timeout=60)
    assert done.stdout.splitlines() == [f"{each} none"] * 2, done.stderr
    argv = ["srun", f"--gpus-per-node={each + 1}", "true"]
    done = captured(argv, env=cluster.client_env(), timeout=60)
    assert done.returncode != 0
    status = msgspec.json.decode(_cli("status", "--dir", str(place), "--json"))
    assert status["gpus"] == {"node1": each, "node2": each}
    assert not status["gpus_are_real"]


@pytest.mark.slurm
@pytest.mark.scenario("GPU2")
def test_without_the_option_no_gpu_is_granted(place: Path) -> None:
    assert "GPU" not in _cli("start", "--dir", str(place), "--nodes", "1")
    argv = ["srun", "--gpus-per-node=1", "true"]
    environ = DevCluster(place).client_env()
    assert subprocess.run(argv, env=environ, capture_output=True, timeout=60, check=False).returncode != 0


@pytest.mark.slurm
@pytest.mark.gpu
def test_a_gpu_of_this_machine_is_granted_by_its_number(place: Path) -> None:
    if not real_gpus():
        pytest.skip("NOT RUN: there is no GPU here")
    assert "of this machine" in _cli("start", "--dir", str(place), "--nodes", "1", "--gpus", "auto")
    argv = ["srun", "--gpus-per-node=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    environ = DevCluster(place).client_env()
    done = captured(argv, env=environ, timeout=60, check=True)
    assert done.stdout.strip() == "0"
