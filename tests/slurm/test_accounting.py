"""Past jobs as sacct lists them: recorded on 22.05.8 with slurmdbd, by an embedded cluster with accounting."""

from verl_slurm.slurm import commands
from verl_slurm.slurm.parse import PastJobs, parse_past_jobs

RECORDED = """\
PREEMPTED|1795735703|1795735705|27
REQUEUED|1795735719|1795735720|2
REQUEUED|1795735726|1795735726|1
CANCELLED by 0|1795735730|1795735730|0
FAILED|1795735730|1795735730|0
"""
"""A job that the grace time ended, one that asked for its requeue within it (as the lead does) and once more, and was
cancelled, and one that failed."""


def test_each_start_has_its_wait_and_what_is_no_line_of_one_is_passed_over() -> None:
    assert parse_past_jobs(RECORDED) == PastJobs(waits_s=(2.0, 1.0, 0.0, 0.0, 0.0), ran_s=30.0, thrown_out=3)
    text = "PENDING|1795735719|Unknown|0\nslurm_load_jobs error|x\n\nRUNNING|-5|7|١٢\nRUNNING|9|7|1\n"
    assert parse_past_jobs(text) == PastJobs(waits_s=(0.0,), ran_s=1.0, thrown_out=0)
    argv = commands.list_past_jobs("gpu", 30)
    assert {"--partition=gpu", "--duplicates", "--starttime=now-30days"} <= set(argv)
