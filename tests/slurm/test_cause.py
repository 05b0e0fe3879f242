"""The table of causes, on what six Slurms from 22.05.8 to 26.05.5 really printed (golden/, one file a moment), and on
forms of versions between them, composed from the source (golden/newer/, see golden/README.md)."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from verl_slurm.journal.causes import CauseKind, meaning_of
from verl_slurm.slurm.cause import Trigger, decide_cause
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.parse import ended_as, parse_job

GOLDEN = Path(__file__).parent / "golden"
EARLY = datetime.fromtimestamp(1795222232, UTC)


# As test_moments.py of tests/slurm_cluster records them.
RECORDED: dict[str, tuple[Trigger, CauseKind]] = {
    "batch_killed_over": ("poll", "failed"),
    "cancel_mode_0_completing": ("term", "preemption"),
    "cancel_mode_6_completing": ("term", "preemption"),
    "node_lost_completing": ("term", "node_lost"),
    "norequeue_node_down_completing": ("term", "failed"),
    "norequeue_preempted_completing": ("term", "preemption"),
    "norequeue_preempted_in_grace": ("warning", "preemption"),
    "preempted_completing": ("term", "requeued"),
    "preempted_in_grace": ("warning", "preemption"),
    "requeue_completing": ("term", "requeued"),
    "running": ("poll", "none"),
    "scancel_completing": ("term", "cancel"),
    "scancel_in_grace_completing": ("term", "cancel"),
    "scancel_over": ("poll", "cancel"),
    "stopped": ("poll", "suspended"),
    "suspended": ("poll", "suspended"),
    "time_limit_completing": ("term", "time_limit"),
}
# Its JSON has one word as well. Where the partition has no grace time, SlurmClient.job knows better.
NOT_TOLD: dict[str, dict[str, CauseKind]] = {
    "23.02.8": {"cancel_mode_0_completing": "cancel", "cancel_mode_6_completing": "cancel"},
}


def facts_of(name: str) -> JobFacts:
    """With what the JSON of the same moment adds, where there is one: as SlurmClient.job."""
    facts = parse_job((GOLDEN / f"{name}.txt").read_text(), 1)
    more = GOLDEN / f"{name}.json"
    return msgspec.structs.replace(facts, ended_as=ended_as(more.read_text(), 1)) if more.exists() else facts


@pytest.mark.parametrize(
    ("moment", "trigger", "kind"),
    [
        ("running", "poll", "none"),
        ("running", "warning", "operator"),
        ("running", "requeue_wish", "operator_requeue"),
        ("running", "term", "operator"),
        ("preempted_in_grace", "warning", "preemption"),
        ("preempted_in_grace", "requeue_wish", "preemption"),
        ("preempted_in_grace", "term", "preemption"),
        ("preempted_in_grace", "poll", "preemption"),
        ("preempted_completing", "term", "requeued"),
        ("preempted_requeued", "poll", "requeued"),
        ("running_again", "poll", "requeued"),
        ("norequeue_preempted_in_grace", "warning", "preemption"),
        ("norequeue_preempted_completing", "term", "preemption"),
        ("norequeue_preempted", "poll", "preemption"),
        ("time_limit_completing", "term", "time_limit"),
        ("time_limit_over", "poll", "time_limit"),
        ("scancel_completing", "term", "cancel"),
        ("scancel_over", "poll", "cancel"),
        ("scancel_in_grace_completing", "term", "cancel"),
        ("scancel_in_grace_over", "poll", "cancel"),
        ("requeue_completing", "term", "requeued"),
        ("requeue_pending", "poll", "requeued"),
        ("requeuehold_completing", "term", "requeued"),
        ("node_lost_completing", "term", "requeued"),
        ("suspended", "poll", "suspended"),
        ("pending", "poll", "unknown"),
        ("stopped", "poll", "suspended"),
        ("norequeue_node_down_completing", "term", "failed"),
        ("norequeue_node_down_over", "poll", "failed"),
        ("batch_killed_completing", "poll", "failed"),
        ("cancel_mode_preempted_completing", "term", "cancel"),  # it might be one, and then it must stay one
        ("cancel_mode_preempted_over", "poll", "preemption"),
        ("newer/23.02_batch_killed_completing", "poll", "failed"),
        ("newer/24.05_out_of_memory_completing", "poll", "failed"),
        ("newer/25.05_norequeue_node_down_completing", "term", "failed"),
        ("newer/25.05_array_task_running", "poll", "none"),
        ("newer/25.11_het_component_running", "poll", "none"),
        ("newer/25.11_running_expedited", "poll", "none"),
        ("newer/25.11_node_lost_completing_expedited", "term", "node_lost"),
        ("newer/25.11_expediting", "poll", "requeued"),
        ("newer/25.11_requeue_hold_expedited", "poll", "requeued"),
    ],
)
def test_each_recorded_moment_is_understood(moment: str, trigger: Trigger, kind: CauseKind) -> None:
    cause = decide_cause(trigger, facts_of(moment), own_restarts=0, signal_lead_s=60, now=EARLY)
    assert cause.kind == kind, cause.evidence
    assert "JobState=" in cause.evidence


@pytest.mark.parametrize("version", ["23.02.8", "23.11.11", "24.11.5", "25.11.7", "26.05.5"])
def test_each_moment_of_a_newer_slurm_is_understood(version: str) -> None:
    moments = {file.stem for file in (GOLDEN / version).glob("*.txt")}
    assert moments == set(RECORDED)
    decided = {
        moment: decide_cause(
            RECORDED[moment][0],
            facts_of(f"{version}/{moment}"),
            own_restarts=0,
            signal_lead_s=60,
            now=datetime.fromtimestamp(1795567000, UTC),
        ).kind
        for moment in moments
    }
    told: dict[str, CauseKind] = {moment: kind for moment, (_, kind) in RECORDED.items()}
    assert decided == told | NOT_TOLD.get(version, {})


@pytest.mark.parametrize(
    "moment", ["node_lost_completing", "other_node_lost_completing", "node_down_completing"]
)
def test_a_requeue_with_a_node_that_slurm_calls_down_is_a_lost_node(moment: str) -> None:
    cause = decide_cause(
        "term", facts_of(moment), own_restarts=0, signal_lead_s=60, now=EARLY, lost_nodes=["node2"]
    )
    assert (cause.kind, meaning_of(cause.kind).ended_by) == ("node_lost", "Slurm")
    assert "node2" in cause.evidence


@pytest.mark.parametrize(
    "moment",
    [
        "23.02.8/node_lost_completing",
        "24.11.5/node_lost_completing",
        "25.11.7/node_lost_completing",
        "26.05.5/node_lost_completing",
        "newer/25.11_node_lost_completing_expedited",
    ],
)
def test_a_slurm_that_names_the_failed_node_is_believed(moment: str) -> None:
    cause = decide_cause("term", facts_of(moment), own_restarts=0, signal_lead_s=60, now=EARLY)
    assert "FailedNode=node2" in cause.evidence


def test_a_cancel_in_the_grace_time_of_a_job_that_may_not_be_requeued_is_seen_where_slurm_says_it() -> None:
    facts = facts_of("norequeue_preempted_completing")
    seen = [
        decide_cause(
            "term", msgspec.structs.replace(facts, ended_as=end), own_restarts=0, signal_lead_s=60, now=EARLY
        ).kind
        for end in (None, "PREEMPTED", "CANCELLED")
    ]
    assert seen == ["preemption", "preemption", "cancel"]


def test_stopped_steps_hide_neither_a_preemption_nor_the_time_limit() -> None:
    facts = facts_of("stopped")
    assert facts.is_running
    assert facts.end_time is not None
    preempted = msgspec.structs.replace(facts, preempt_time=EARLY)
    assert decide_cause("poll", preempted, own_restarts=0, signal_lead_s=60, now=EARLY).kind == "preemption"
    near = decide_cause("poll", facts, own_restarts=0, signal_lead_s=60, now=facts.end_time)
    assert near.kind == "time_limit"


def test_a_cancel_in_the_grace_time_of_a_job_that_may_not_be_requeued_is_a_cancel() -> None:
    facts = msgspec.structs.replace(facts_of("scancel_in_grace_completing"), requeue=False)
    assert decide_cause("term", facts, own_restarts=0, signal_lead_s=60, now=EARLY).kind == "cancel"


def test_the_grace_time_gives_the_deadline_a_jobs_own_restarts_count_and_the_unheard_of_is_unknown() -> None:
    facts = facts_of("preempted_in_grace")
    cause = decide_cause("warning", facts, own_restarts=0, signal_lead_s=60, now=EARLY)
    assert cause.deadline == facts.end_time
    assert facts.preempt_time is not None
    assert cause.deadline == facts.preempt_time + timedelta(seconds=8)
    facts = facts_of("running_again")
    assert decide_cause("poll", facts, own_restarts=1, signal_lead_s=60, now=EARLY).kind == "none"
    assert decide_cause("poll", facts, own_restarts=0, signal_lead_s=60, now=EARLY).kind == "requeued"
    facts = msgspec.structs.replace(facts_of("running"), state="STAGE_OUT")
    assert decide_cause("poll", facts, own_restarts=0, signal_lead_s=60, now=EARLY).kind == "unknown"


@pytest.mark.parametrize(
    ("seconds_before_the_end", "kind"),
    [
        (89, "time_limit"),  # 30 s asked for, up to 60 s early
        (32, "time_limit"),
        (-5, "time_limit"),
        (91, "operator"),
    ],
)
def test_a_warning_near_the_end_is_the_time_limit(seconds_before_the_end: int, kind: CauseKind) -> None:
    facts = facts_of("time_limit_running")
    assert facts.end_time is not None
    cause = decide_cause(
        "warning",
        facts,
        own_restarts=0,
        signal_lead_s=30,
        now=facts.end_time - timedelta(seconds=seconds_before_the_end),
    )
    assert cause.kind == kind
    assert cause.deadline == (facts.end_time if kind == "time_limit" else None)


def test_a_cancelled_job_never_looks_like_one_to_requeue() -> None:
    paths = sorted([*GOLDEN.glob("scancel*.txt"), *(GOLDEN / "newer").glob("*scancel*.txt")])
    assert len(paths) > 3
    for path in paths:
        name = str(path.relative_to(GOLDEN).with_suffix(""))
        for trigger in ("warning", "term", "poll"):
            cause = decide_cause(trigger, facts_of(name), own_restarts=0, signal_lead_s=60, now=EARLY)
            assert cause.kind not in {"preemption", "time_limit", "failed", "operator_requeue"}, name


@pytest.mark.parametrize("state", ["SIGNALING", "RESIZING"])
def test_a_job_that_is_just_being_signalled_is_a_running_job(state: str) -> None:
    facts = msgspec.structs.replace(facts_of("preempted_in_grace"), state=state)
    cause = decide_cause("warning", facts, own_restarts=0, signal_lead_s=60, now=EARLY)
    assert cause.kind == "preemption"


def test_an_end_before_the_jobs_own_limit_is_that_of_its_account() -> None:
    facts = facts_of("time_limit_completing")
    for limit_s, said in ((facts.time_limit_s, False), (1200, True), (None, True)):
        facts = msgspec.structs.replace(facts, time_limit_s=limit_s)
        cause = decide_cause("term", facts, own_restarts=0, signal_lead_s=30, now=EARLY)
        assert cause.kind == "time_limit"
        assert ("a limit of its account or QOS" in cause.evidence) == said
