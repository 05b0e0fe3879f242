import pytest

from verl_slurm.base.errors import SlurmMissing
from verl_slurm.slurm.slurm_environment import SlurmJob

FIRST = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "node1",
    "SLURM_CLUSTER_NAME": "dev87ec5146",
    "SLURM_JOB_PARTITION": "preemptible",
    "SLURM_SUBMIT_DIR": "/home/ada",
}


@pytest.mark.scenario("L14")
def test_a_first_start_a_restart_an_array_task_and_no_job_at_all() -> None:
    job = SlurmJob.from_environ(FIRST)
    assert job is not None
    assert (job.job_id, job.restart_count, job.num_nodes) == (2, 0, 2)
    assert (job.node_list, job.node_name, job.partition) == ("node[1-2]", "node1", "preemptible")
    assert job.label == "2"
    env = FIRST | {"SLURM_RESTART_COUNT": "3", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"}
    job = SlurmJob.from_environ(env)
    assert job is not None
    assert (job.restart_count, job.label, job.job_id) == (3, "1_0", 2)
    assert SlurmJob.from_environ({}) is None


@pytest.mark.scenario("L14", "M10")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_JOB_ID", "1;reboot"),
        ("SLURM_JOB_ID", "1\n2"),
        ("SLURM_JOB_ID", "-1"),
        ("SLURM_JOB_ID", " 1"),
        ("SLURM_JOB_ID", "1_000"),
        ("SLURM_JOB_ID", "٣"),
        ("SLURM_JOB_ID", "0"),
        ("SLURM_JOB_ID", "9" * 4301),
        ("SLURM_RESTART_COUNT", "one"),
        ("SLURM_RESTART_COUNT", "4294967296"),
        ("SLURM_JOB_NODELIST", "--version"),
        ("SLURM_JOB_NODELIST", "node1 node2"),
        ("SLURM_JOB_NODELIST", ""),
        ("SLURMD_NODENAME", "node1\nnode2"),
        ("SLURMD_NODENAME", "$(id)"),
        ("SLURM_CLUSTER_NAME", "../x"),
    ],
)
def test_hostile_values_are_refused(name: str, value: str) -> None:
    with pytest.raises(SlurmMissing, match=name):
        SlurmJob.from_environ(FIRST | {name: value})
