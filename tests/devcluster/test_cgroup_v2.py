"""The embedded cluster where root has cgroup v2 mounted, writable, and there is no systemd, as in most containers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = pytest.mark.slurm

# In a mount namespace of its own. Nothing of the machine's cgroups is changed.
MOUNT = "mount -t cgroup2 none /sys/fs/cgroup"
START = """
"$1" -m verl_slurm.cli devcluster start --dir "$2" --nodes 2
SLURM_CONF="$2/slurm.conf" timeout 60 srun --nodes=2 echo granted
"$1" -m verl_slurm.cli devcluster stop --dir "$2"
"""


def _where_cgroup_v2_is_mounted(story: str, directory: Path, *, timeout_s: int) -> str:
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
    argv = [*namespace, f"{MOUNT}\n{story}", "sh", sys.executable, str(directory)]
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
