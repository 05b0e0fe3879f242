"""Services beside the ranks of a run on a real Slurm: on nodes of their own, killed, preempted with it, and gone."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import ONE_RANK, ROOT, SMALL, LiveRun, ends_like, wait_until_gone
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

EXAMPLES = ROOT / "configs"


class Judged(LiveRun):
    """A run whose reward asks a judge on a node of its own."""

    def __init__(self, cluster: DevCluster, folder: Path, *words: str, slurm: str = "") -> None:
        # A program of its own for each run: by its path its processes are told from others'.
        self.folder, judge = folder, shutil.copy(EXAMPLES / "judge.py", folder / "judge.py")
        service = f"{{command: [{judge}], nodes: 1, probe: /health{slurm}}}"
        reward = f"model.reward=python:{EXAMPLES}/judged_reward.py:score"
        super().__init__(cluster, folder / "run", *SMALL, reward, f"services.judge={service}", *words)

    def judges(self) -> list[psutil.Process]:
        """The judge, as it runs now."""
        (program,) = _copies(self.folder)
        found = [one for one in psutil.process_iter() if program in (_argv(one) or [])]
        return [one for one in found if "verl_slurm_daemon.agent.ranks" not in (_argv(one) or [])]

    def check(self) -> None:
        """The judge has a node that no rank has, and ends with the run."""
        nodes = {one.environ()["SLURMD_NODENAME"] for one in self.judges()}
        assert len(nodes) == 1
        assert not nodes & {one.environ()["SLURMD_NODENAME"] for one in self.ranks()}, self.story()


def _copies(folder: Path) -> list[str]:
    """The judge's program, as it was submitted: the run has a copy of it."""
    return [str(path) for path in folder.glob("run/code/*/judge.py")]


def _argv(process: psutil.Process) -> list[str] | None:
    try:
        return process.cmdline()
    except psutil.Error:
        return None


@pytest.fixture(scope="module")
def twin(cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """The same run, undisturbed."""
    run = Judged(cluster, tmp_path_factory.mktemp("judged")).submit()
    run.wait_end()
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for program in _copies(tmp_path):
        wait_until_gone(program)


@pytest.mark.scenario("L19")
def test_a_judge_is_restarted_where_it_was_and_started_anew_after_a_preemption(
    cluster: DevCluster, folder: Path
) -> None:
    run = Judged(cluster, folder, *ONE_RANK).submit()
    try:
        ready = run.wait_event("service_ready")
        run.wait_phase("generate", step=1)
        run.check()
        (place,) = run.status()["services"]
        assert run.status()["services"] == {place: f"ready, {ready['address']}"}
        token = run.ranks()[0].environ()["VERL_SLURM_SERVICE_TOKEN"]
        run.kill(run.judges())
        run.wait_event("service_ended", restarts=1)
        again = run.wait_event("service_ready", after=run_length(run, "service_ended"))
        assert again["address"] == ready["address"]
        run.wait_phase("generate", step=2)
        assert len(run.events("restart")) == 1, run.story()
        preempt(cluster, int(run.job_id), hold_s=1)
        run.wait_event("ended", exit_code=25)
        run.wait_event("service_ready", attempt=2)
        run.wait_end()  # with the weights of its twin: the heterogeneous job below
    finally:
        run.cancel()
    for folder_, _, names in os.walk(run.paths.root):
        for name in names:
            assert token.encode() not in (Path(folder_) / name).read_bytes(), name


def run_length(run: LiveRun, kind: str) -> int:
    """How many events there were up to the first of this kind."""
    return [event["event"] for event in run.events()].index(kind)


@pytest.mark.soak  # another one runs often: test_templates.py
def test_a_heterogeneous_job_has_a_component_for_the_judge(
    cluster: DevCluster, twin: LiveRun, folder: Path
) -> None:
    run = Judged(cluster, folder, slurm=f", cpus: 1, slurm: {{comment: {int(time.time())}}}").submit()
    try:
        run.wait_phase("generate", step=1)
        run.check()
        assert run.slurm("squeue", "--noheader", "-o", "%i").count(f"{run.job_id}+") == 2
        run.slurm("scontrol", "requeue", run.job_id)
        run.wait_event("started", requeues=1)
        run.wait_event("service_ready", attempt=2)
        ends_like(run, twin)
    finally:
        run.cancel()


@pytest.mark.parametrize("who", ["lead", pytest.param("host", marks=pytest.mark.soak)])
@pytest.mark.long
def test_a_judge_is_not_left_behind_by_a_lead_or_host_that_is_killed(
    cluster: DevCluster, folder: Path, who: str
) -> None:
    run = Judged(cluster, folder).submit()
    try:
        run.wait_event("training")
        before = run.judges()
        killed = [
            one
            for role, one in run.daemons().items()
            if role.startswith("lead" if who == "lead" else "service")
        ]
        run.kill(killed)
        _, alive = psutil.wait_procs(before, timeout=60)
        assert not alive, run.story()
        if who == "host":
            # The run needs it: it saves, and goes on in its next attempt.
            run.wait_event("cause", cause="service")
        run.wait_event("service_ready", attempt=2)
    finally:
        run.cancel()
