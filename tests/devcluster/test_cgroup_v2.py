"""The embedded cluster and the demo where cgroup v2 is mounted and there is no systemd, as in most containers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_demo import QUICK
from verl_slurm.devcluster.cluster import DevCluster

pytestmark = pytest.mark.slurm

# In a mount namespace of its own. Nothing of the machine's cgroups is changed.
MOUNT = "mount -t cgroup2 none /sys/fs/cgroup"
START = """
"$1" -m verl_slurm.cli devcluster start --dir "$2" --nodes 2
SLURM_CONF="$2/slurm.conf" timeout 60 srun --nodes=2 echo granted
"$1" -m verl_slurm.cli devcluster stop --dir "$2"
"""
DEMO = 'python=$1 dir=$2; shift 2; exec "$python" -m verl_slurm.cli demo --dir "$dir" "$@"'


def _where_cgroup_v2_is_mounted(story: str, directory: Path, *words: str, timeout_s: int) -> str:
    """What the story prints; $1 is Python, $2 the directory."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("NOT RUN: no unshare here (util-linux)")
    namespace = [unshare, "--mount", "sh", "-euc"]
    tried = subprocess.run([*namespace, MOUNT], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"NOT RUN: cgroup v2 cannot be mounted here: {tried.stderr.strip()}")
    if Path("/run/systemd/system").exists():
        pytest.skip("NOT RUN: there is systemd here")
    argv = [*namespace, f"{MOUNT}\n{story}", "sh", sys.executable, str(directory), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.scenario("GPU1")
def test_the_cluster_runs_jobs_where_cgroup_v2_is_mounted_without_systemd(short_dir: Path) -> None:
    try:
        said = _where_cgroup_v2_is_mounted(START, short_dir, timeout_s=180)
        assert said.splitlines().count("granted") == 2
    finally:
        DevCluster(short_dir).stop()


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.scenario("GPU1")
def test_the_demo_runs_to_its_end_where_cgroup_v2_is_mounted(short_dir: Path) -> None:
    """`make demo` itself, with more steps: unshare -m sh -c 'mount -t cgroup2 none /sys/fs/cgroup && make demo'"""
    try:
        said = _where_cgroup_v2_is_mounted(DEMO, short_dir, *QUICK, timeout_s=500)
        assert "bit for bit" in said
    finally:
        DevCluster(short_dir / "cluster").stop()
