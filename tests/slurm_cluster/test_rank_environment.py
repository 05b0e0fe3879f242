"""Modules, another Python, commands, variables and secrets of a run's ranks, on a real Slurm."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import SMALL, LiveRun
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

# A reward, and what its rank finds around it.
REWARD = """
import json, os, sys
names = ("NODE_SET_UP", "NCCL_DEBUG", "DEMO_TOKEN", "TOOL_HOME")
with open(f"PLACE.{os.environ['SLURMD_NODENAME']}.json", "w") as seen:
    json.dump({"prefix": sys.prefix, **{name: os.environ.get(name) for name in names}}, seen)

def score(prompts, responses, answers):
    return [0.0] * len(responses)
"""
MODULES = Path("/usr/share/modules/init/bash").exists()


@pytest.fixture
def run(cluster: DevCluster, tmp_path: Path) -> Iterator[LiveRun]:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (next(venv.glob("lib/python*/site-packages")) / "ours.pth").write_text(ours)
    (tmp_path / "reward.py").write_text(REWARD.replace("PLACE", f"{tmp_path}/reward.py"))
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/tool").write_text("#%Module\nsetenv TOOL_HOME /opt/tool\n")
    secret = tmp_path / "secret"
    secret.write_text("sesame\n")
    secret.chmod(0o600)
    words = (
        "train.steps=1",
        "train.batch_size_per_device=16",
        f"model.reward=python:{tmp_path}/reward.py:score",
        f"slurm.python={venv}",
        "slurm.setup=['export NODE_SET_UP=$SLURMD_NODENAME PYTHONHOME= LD_PRELOAD=']",
        "env.NCCL_DEBUG=WARN",
        f"env_from_files.DEMO_TOKEN={secret}",
        *(["slurm.modules=[tool]"] if MODULES else []),
    )
    live = LiveRun(cluster, tmp_path / "run", *SMALL, *words)
    yield live
    live.cancel()


def test_each_node_sets_up_its_ranks_and_no_secret_is_written(
    run: LiveRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODULEPATH", str(tmp_path / "modules"))
    run.submit()
    run.wait_end()
    seen = {
        path.name.split(".")[2]: json.loads(path.read_text()) for path in tmp_path.glob("reward.py.*.json")
    }
    assert sorted(seen) == ["node1", "node2"]
    for node, found in seen.items():
        assert found == {
            "prefix": str(tmp_path / "venv"),
            "NODE_SET_UP": node,
            "NCCL_DEBUG": "WARN",
            "DEMO_TOKEN": "sesame",
            "TOOL_HOME": "/opt/tool" if MODULES else None,
        }
    for folder, _, names in os.walk(run.paths.root):
        for name in names:
            assert b"sesame" not in (Path(folder) / name).read_bytes(), name


def test_a_node_that_cannot_be_set_up_is_told_by_its_command(cluster: DevCluster, tmp_path: Path) -> None:
    words = (
        "slurm.setup=['test $SLURMD_NODENAME != node2']",
        "daemon.no_progress_limit=1",
        "daemon.backoff_s=0",
    )
    run = LiveRun(cluster, tmp_path / "run", *SMALL, *words)
    try:
        run.submit()
        crash = run.wait_event("crash")
        assert crash["node"] == "node2"
        assert "slurm.setup[0] failed with exit code 1" in crash["detail"]
    finally:
        run.cancel()
