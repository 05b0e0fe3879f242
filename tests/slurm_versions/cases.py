"""What differs between versions of Slurm, as tests: `make test-slurm-versions` runs them, and a page counts them."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

HOST = "host"
SUITES = (HOST, "trixie", "sid")
"""This machine's own Slurm, and releases of Debian: 24.11 and the newest."""

_CLUSTER = "tests/slurm_cluster/"
_CAUSES = _CLUSTER + "test_interruptions.py::"
_MODES = _CLUSTER + "test_preempt_modes.py::"
_MOMENTS = _CLUSTER + "test_moments.py::"
_STAYS = _CLUSTER + "test_stays_finished.py::"

CASES: dict[str, tuple[str, ...]] = {
    "What Slurm says of a job, moment by moment (jobs of bash)": (
        _MOMENTS + "test_a_running_job_has_no_cause_but_its_operators",
        _MOMENTS + "test_a_preemption_shows_in_its_grace_time_and_as_a_requeue_at_its_end",
        _MOMENTS + "test_a_preemption_of_a_job_that_may_not_be_requeued_is_no_cancel",
        _MOMENTS + "test_a_cancel_is_one_from_its_first_moment_on",
        _MOMENTS + "test_a_cancel_in_the_grace_time_is_no_preemption",
        _MOMENTS + "test_an_operators_requeue_is_one",
        _MOMENTS + "test_a_job_that_stands_still_is_not_ended",
        _MOMENTS + "test_a_batch_process_that_is_killed_is_a_failure",
        _MOMENTS + "test_a_node_that_is_lost_is_named",
        _MOMENTS + "test_a_node_down_of_a_job_that_may_not_be_requeued_is_a_failure",
        _MOMENTS + "test_the_time_limit_is_named",
        _MOMENTS + "test_a_preemption_that_cancels_is_told_from_a_cancel_as_far_as_slurm_says_it[6]",
        _MOMENTS + "test_a_preemption_that_cancels_is_told_from_a_cancel_as_far_as_slurm_says_it[0]",
    ),
    "A run is interrupted, resumes, and ends with the same weights": (
        _CAUSES + "test_a_preemption_in_mid_phase_is_saved_requeued_and_resumed[generate]",
        _CAUSES + "test_a_preemption_in_mid_phase_is_saved_requeued_and_resumed[update]",
        _CAUSES + "test_the_time_limit_is_warned_of_saved_requeued_and_resumed",
        _CAUSES + "test_a_cancelled_job_is_saved_and_stays_cancelled",
        _CAUSES + "test_an_operators_requeue_saves_and_is_not_requeued_twice",
        _CAUSES + "test_a_requeue_that_is_wished_for_is_verified_first_and_the_step_survives_it",
        _CAUSES + "test_an_operators_usr1_saves_and_training_goes_on",
    ),
    "Processes and nodes": (
        _CAUSES + "test_a_dead_node_is_left_to_slurm_and_the_run_goes_on_elsewhere[the lead's]",
        _CAUSES + "test_a_dead_node_is_left_to_slurm_and_the_run_goes_on_elsewhere[another]",
        _CLUSTER + "test_ends_without_requeue.py::"
        "test_a_node_that_fails_a_job_which_may_not_be_requeued_is_followed_by_another_job",
        _CAUSES + "test_everything_killed_on_the_leads_node_is_requeued_by_the_other_agent",
        _CAUSES + "test_an_srun_that_is_killed_before_the_lead_takes_no_agent_with_it",
        _CAUSES + "test_a_lead_that_dies_after_its_ranks_is_requeued_by_the_other_agent",
    ),
    "PreemptMode and grace time": (
        _MODES + "test_a_preemption_that_cancels_the_job_is_outlived_with_a_grace_time_and_without",
        _MODES + "test_where_a_preemption_leaves_no_time_for_a_save_the_ledger_brings_the_rollouts_back",
        _MODES + "test_a_preemption_that_suspends_the_job_costs_it_nothing_but_time",
    ),
    "Ends": (
        _STAYS + "test_a_finished_run_that_was_preempted_once_stays_finished",
        _STAYS + "test_a_cancelled_run_that_was_preempted_once_stays_cancelled",
        _STAYS + "test_a_preempted_job_that_may_not_be_requeued_is_followed_by_another",
    ),
    "Arrays, expedite": (
        _CLUSTER + "test_arrays.py::test_a_task_of_an_array_is_requeued_and_no_other",
        _CLUSTER + "test_expedite.py::test_an_expedited_job_that_loses_a_node_starts_again_before_all_others",
    ),
}
"""Part of the table → tests, in the order in which they run."""


def sentence(case: str) -> str:
    """What a test's name says, with its parameter."""
    name, _, parameter = case.rpartition("::")[2].removeprefix("test_").partition("[")
    text = name.replace("_", " ")
    return f"{text} ({parameter.rstrip(']')})" if parameter else text
