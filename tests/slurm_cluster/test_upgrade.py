"""A job of an older version goes on with this one: queued there, or trained and preempted there."""

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT, SMALL, LiveRun, ends_like
from tests.processes import python_path
from verl_slurm.devcluster.cluster import DevCluster
from verl_slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long, pytest.mark.variant]

FORMER = "d841de5"


class UpgradedRun(LiveRun):
    """A run whose code is found through a link: to the former version, until `upgrade`."""

    def __init__(self, cluster: DevCluster, root: Path, code: Path) -> None:
        super().__init__(cluster, root, *SMALL)
        self.code = code
        self.argv[0] = str(code / "configs/quickstart.yaml")
        self.argv.append("daemon.requeue_delay_s=10")  # time enough for the upgrade, between two attempts

    def env(self) -> dict[str, str]:
        # `python -m` would find this checkout in the working directory first.
        return super().env() | python_path(self.code, self.code / "daemon") | {"PYTHONSAFEPATH": "1"}

    def upgrade(self) -> None:
        later = self.code.with_name("later")
        later.symlink_to(ROOT)
        os.replace(later, self.code)


@pytest.fixture
def run(cluster: DevCluster, tmp_path: Path) -> Iterator[UpgradedRun]:
    words = ["git", "-C", str(ROOT), "archive", FORMER, "verl_slurm", "daemon", "configs"]
    archive = subprocess.run(words, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"NOT RUN: this checkout does not have the history back to {FORMER}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tmp_path / "former", filter="data")
    code = tmp_path / "code"
    code.symlink_to(tmp_path / "former")
    live = UpgradedRun(cluster, tmp_path / "run", code)
    yield live
    live.cancel()


def test_a_job_that_the_former_version_queued_starts_with_this_one(run: UpgradedRun) -> None:
    blocker = run.slurm("sbatch", "--parsable", "--exclusive", "-N4", "--wrap=sleep 600").strip()
    run.submit()
    assert run.facts().state == "PENDING"
    run.upgrade()
    run.slurm("scancel", blocker)
    run.wait_event("started")
    run.wait_end()
    assert [event["event"] for event in run.events("crash")] == []


def test_a_run_that_the_former_version_trained_and_saved_goes_on_with_this_one_bit_for_bit(
    run: UpgradedRun, twin: LiveRun
) -> None:
    run.submit()
    run.wait_phase("generate")
    preempt(run.cluster, int(run.job_id), hold_s=1)
    saved = run.wait_event("saved", emergency=True)
    run.wait_event("ended", exit_code=25)
    seen = len(run.events())
    run.upgrade()
    run.wait_event("restart", after=seen, resume=saved["name"])
    run.wait_end()
    ends_like(run, twin)
