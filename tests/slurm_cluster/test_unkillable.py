"""A rank that nobody can kill: frozen by the kernel (cgroup v1), as one that waits for a dead file server."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import SMALL, LiveRun, ends_like
from tests.processes import tell
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]


class Freezer:
    """One group of the kernel's freezer. What is in it stands still, and SIGKILL waits until it is thawed."""

    def __init__(self, group: Path) -> None:
        self._group = group

    def freeze(self, process: psutil.Process) -> None:
        (self._group / "cgroup.procs").write_text(str(process.pid))
        (self._group / "freezer.state").write_text("FROZEN")

    def thaw(self) -> None:
        (self._group / "freezer.state").write_text("THAWED")


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    group = Path(f"/sys/fs/cgroup/freezer/verl-slurm-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"NOT RUN: no freezer of cgroup v1 that we may use: {error}")
    made = Freezer(group)
    try:
        yield made
    finally:
        made.thaw()
        pids = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
        ended = [process for process in psutil.process_iter() if process.pid in pids]
        tell(ended, signal.SIGKILL)
        psutil.wait_procs(ended, timeout=10)
        group.rmdir()


@pytest.mark.scenario("L15")
@pytest.mark.variant
def test_an_unkillable_rank_is_said_holds_nobody_up_and_the_next_life_resumes(
    make_cluster: Callable[..., DevCluster], freezer: Freezer, twin: LiveRun, tmp_path: Path
) -> None:
    # The save before the end is given up 5 s after the TERM: it cannot come to anything. The next life starts a
    # KillWait after this one's end. From KILL on Slurm gives the rank 60 s (UnkillableStepTimeout) before it drains
    # the node.
    cluster = make_cluster(nodes=2, kill_wait_s=30, cred_expire_s=10)
    run = LiveRun(cluster, tmp_path / "run", *SMALL, "daemon.save_margin_s=25").submit()
    try:
        run.wait_phase("update", step=1)
        (node,) = run.other_nodes()
        rank = run.ranks(node)[0]
        freezer.freeze(rank)
        run.slurm("scontrol", "requeue", run.job_id)
        run.wait_event("degraded")
        run.wait_event("ended", exit_code=25)
        assert run.facts().state == "COMPLETING", "Slurm waits for it, and so does the next life"
        # Lead and agents have gone: who waits does not spin.
        left = [process for name in ("node1", "node2") for process in run.processes(name)]
        _, alive = psutil.wait_procs([p for p in left if p.pid != rank.pid], timeout=60)
        assert not alive, run.story()
        said = "".join(path.read_text() for path in run.paths.logs.glob("*agent*"))
        assert f"do_not_die=[{rank.pid}]" in said or f"[{rank.pid}]" in said, said
        assert rank.is_running()

        freezer.thaw()
        run.wait_event("started", requeues=1)
        ends_like(run, twin)
    finally:
        freezer.thaw()
        run.cancel()
