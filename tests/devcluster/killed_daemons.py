"""slurmctld or munged of an embedded cluster, killed and started again."""

import asyncio
import time
from typing import Literal

from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.cluster_processes import end_all
from verl_slurm.slurm.devcluster.state import locked
from verl_slurm.slurm.slurm_client import SlurmClient

_Daemon = Literal["slurmctld", "munged"]

_POLL_S = 0.05


def await_saved_state(cluster: DevCluster, job_id: int, *, timeout_s: float = 60.0) -> None:
    """Until slurmctld has written down that the job is what it is now.

    It does so within seconds of a change. One that is killed before that forgets it, and starts a job that runs
    already a second time, with the same number of restarts (seen on 22.05.8).
    """
    # A change of no consequence: what is written down after it has all that was before. At once, or 5 s later.
    asked, file = time.time_ns(), cluster.directory / "state" / "job_state"
    client = SlurmClient(cluster.client_env())
    asyncio.run(client.run(["scontrol", "update", f"JobId={job_id}", f"Comment={asked}"]))
    deadline = time.monotonic() + timeout_s
    while not file.exists() or file.stat().st_mtime_ns < asked:
        assert time.monotonic() < deadline, "slurmctld does not save its state"
        time.sleep(_POLL_S)


def fail_daemon(cluster: DevCluster, which: _Daemon) -> None:
    """SIGKILL the controller, or munged without which nobody can talk to anybody. Jobs run on.

    What the controller has not written down yet is lost: `await_saved_state`.
    """
    with locked(cluster.directory):
        daemons = cluster.daemons()
        process = daemons.munged if which == "munged" else daemons.slurmctld
        assert process is not None
        assert end_all([process]) == []


def restore_daemon(cluster: DevCluster, which: _Daemon, *, timeout_s: float = 30.0) -> None:
    """Start it again, on the state and with the key that it left, and wait until Slurm answers."""
    with locked(cluster.directory):
        if which == "munged":
            cluster.start_munged()
        else:
            cluster.start_slurmctld()
    deadline = time.monotonic() + timeout_s
    while not cluster.node_states():
        assert time.monotonic() < deadline, f"Slurm does not answer since {which} was started again"
        time.sleep(_POLL_S)
