"""A job array whose tasks are runs of their own: what strikes one of them leaves the other alone."""

from pathlib import Path

import pytest

from tests.harness import ROOT, SMALL, LiveRun, ends_like
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]

SCRIPT = """#!/bin/bash
exec /bin/bash {template} {base}/run$SLURM_ARRAY_TASK_ID
"""


@pytest.mark.scenario("L14")
@pytest.mark.variant
def test_a_task_of_an_array_is_requeued_and_no_other(
    cluster: DevCluster, twin: LiveRun, tmp_path: Path
) -> None:
    runs = {task: LiveRun(cluster, tmp_path / f"run{task}", *SMALL) for task in (1, 2)}
    for run in runs.values():
        run.cli("submit", *run.argv, "--prepare-only")
    script = tmp_path / "array.sh"
    script.write_text(SCRIPT.format(template=ROOT / "sbatch/multi_node.sbatch", base=tmp_path))
    options = ["--array=1-2", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--requeue", "--time=20"]
    options += ["--signal=B:USR1@120", "--open-mode=append", "--output=/dev/null"]
    array = runs[1].slurm("sbatch", "--parsable", *options, str(script)).strip()
    try:
        for run in runs.values():
            run.job_id = run.wait_event("started")["job_id"]
        # That task has the array's own number, which Slurm takes for all of them.
        (struck,) = (run for run in runs.values() if run.job_id == array)
        (spared,) = (run for run in runs.values() if run.job_id != array)
        struck.wait_phase("generate")
        preempt(cluster, int(struck.job_id), hold_s=1)
        saved = struck.wait_event("saved", emergency=True)
        struck.wait_event("requeue", accepted=True)
        struck.wait_event("ended", exit_code=25)
        struck.wait_event("restart", resume=saved["name"])
        for run in (spared, struck):
            ends_like(run, twin)
        assert [len(run.events("started")) for run in (spared, struck)] == [1, 2], spared.story()
        assert spared.facts().restarts == 0
        assert not spared.events("cause"), spared.story()
    finally:
        twin.slurm("scancel", array, check=False)
