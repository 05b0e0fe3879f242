"""A number that comes again, on another cluster or where a cluster's begin anew, is another job."""

from verl_slurm.journal import events as ev
from verl_slurm.journal.folds.jobs import newest_job, predecessor_of, successor_of

FORMER = [
    ev.Submitted(slurm="there", job_id="7"),
    ev.Started(slurm="there", attempt=1, job_id="7"),
    ev.Successor("7", slurm="there", job_id="8"),
]


def test_the_same_number_on_another_cluster_is_a_job_of_its_own() -> None:
    job = newest_job([*FORMER, ev.Submitted(slurm="here", job_id="7")])
    assert job is not None
    assert (job.job_id, job.slurm, job.queued_by_us) == ("7", "here", True)


def test_a_number_that_comes_again_follows_nothing_and_has_no_successor() -> None:
    assert (successor_of(FORMER, "7"), predecessor_of(FORMER, "8")) == ("8", "7")
    again = [*FORMER, ev.Submitted(slurm="here", job_id="7"), ev.Submitted(slurm="here", job_id="8")]
    assert (successor_of(again, "7"), predecessor_of(again, "8")) == ("", "")


def test_a_job_that_another_cluster_of_a_federation_started_is_of_that_one() -> None:
    job = newest_job([ev.Submitted(slurm="a", job_id="7"), ev.Started(slurm="b", attempt=1, job_id="7")])
    assert job is not None
    assert (job.slurm, job.queued_by_us) == ("b", False)
