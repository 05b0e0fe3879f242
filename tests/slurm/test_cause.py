"""The table of causes, on what Slurm 22.05.8 really printed (golden/, one file a moment)."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from verl_slurm.slurm.cause import CauseKind, Trigger, decide_cause
from verl_slurm.slurm.parse import JobFacts, parse_job

GOLDEN = Path(__file__).parent / "golden"
EARLY = datetime.fromtimestamp(1795222232, UTC)


def facts_of(name: str) -> JobFacts:
    return parse_job((GOLDEN / f"{name}.txt").read_text(), 1)


@pytest.mark.parametrize(
    ("moment", "trigger", "kind"),
    [
        ("running", "poll", "none"),
        ("running", "node_link", "none"),
        ("running", "warning", "operator"),
        ("running", "term", "operator"),
        ("preempted_in_grace", "warning", "preemption"),
        ("preempted_in_grace", "term", "preemption"),
        ("preempted_in_grace", "poll", "preemption"),
        ("preempted_completing", "term", "requeued"),
        ("preempted_requeued", "poll", "requeued"),
        ("running_again", "poll", "requeued"),
        ("norequeue_preempted_in_grace", "warning", "preemption"),
        ("norequeue_preempted_completing", "term", "preemption"),
        ("norequeue_preempted", "poll", "preemption"),
        ("cancel_mode_preempted_completing", "term", "preemption"),
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
    ],
)
def test_each_recorded_moment_is_understood(moment: str, trigger: Trigger, kind: CauseKind) -> None:
    cause = decide_cause(trigger, facts_of(moment), own_restarts=0, signal_lead_s=60, now=EARLY)
    assert cause.kind == kind, cause.evidence
    assert "JobState=" in cause.evidence


@pytest.mark.parametrize(
    "moment", ["node_lost_completing", "other_node_lost_completing", "node_down_completing"]
)
def test_a_requeue_with_a_node_that_slurm_calls_down_is_a_lost_node(moment: str) -> None:
    cause = decide_cause(
        "term", facts_of(moment), own_restarts=0, signal_lead_s=60, now=EARLY, lost_nodes=["node2"]
    )
    assert (cause.kind, cause.may_requeue, cause.ends_job) == ("node_lost", False, True)
    assert "node2" in cause.evidence


def test_a_cancel_in_the_grace_time_of_a_job_that_may_not_be_requeued_is_a_cancel() -> None:
    facts = msgspec.structs.replace(facts_of("scancel_in_grace_completing"), requeue=False)
    assert decide_cause("term", facts, own_restarts=0, signal_lead_s=60, now=EARLY).kind == "cancel"


def test_the_deadline_of_a_preemption_is_the_end_of_the_grace_time() -> None:
    facts = facts_of("preempted_in_grace")
    cause = decide_cause("warning", facts, own_restarts=0, signal_lead_s=60, now=EARLY)
    assert cause.deadline == facts.end_time
    assert facts.preempt_time is not None
    assert cause.deadline == facts.preempt_time + timedelta(seconds=8)


@pytest.mark.parametrize(
    ("seconds_before_the_end", "already_warned", "kind"),
    [
        (89, False, "time_limit"),  # 30 s asked for, up to 60 s early
        (32, False, "time_limit"),
        (-5, False, "time_limit"),
        (91, False, "operator"),
        (32, True, "operator"),
    ],
)
def test_a_warning_near_the_end_is_the_time_limit_once(
    seconds_before_the_end: int, already_warned: bool, kind: CauseKind
) -> None:
    facts = facts_of("time_limit_running")
    assert facts.end_time is not None
    cause = decide_cause(
        "warning",
        facts,
        own_restarts=0,
        signal_lead_s=30,
        now=facts.end_time - timedelta(seconds=seconds_before_the_end),
        time_limit_warned=already_warned,
    )
    assert cause.kind == kind
    assert cause.deadline == (facts.end_time if kind == "time_limit" else None)


def test_a_restarted_job_counts_from_its_own_restarts() -> None:
    facts = facts_of("running_again")
    assert decide_cause("poll", facts, own_restarts=1, signal_lead_s=60, now=EARLY).kind == "none"
    assert decide_cause("poll", facts, own_restarts=0, signal_lead_s=60, now=EARLY).kind == "requeued"


def test_a_silent_slurm_is_unknown_and_never_requeued() -> None:
    cause = decide_cause("term", None, own_restarts=0, signal_lead_s=60, now=EARLY)
    assert (cause.kind, cause.may_requeue) == ("unknown", False)


def test_only_preemption_and_time_limit_may_be_requeued() -> None:
    for path in sorted(GOLDEN.glob("*.txt")):
        for trigger in ("warning", "term", "poll"):
            cause = decide_cause(trigger, facts_of(path.stem), own_restarts=0, signal_lead_s=60, now=EARLY)
            assert cause.may_requeue == (cause.kind in {"preemption", "time_limit"})
            if "scancel" in path.stem:
                assert not cause.may_requeue


def test_an_unheard_of_state_is_unknown() -> None:
    facts = msgspec.structs.replace(facts_of("running"), state="STAGE_OUT")
    assert decide_cause("poll", facts, own_restarts=0, signal_lead_s=60, now=EARLY).kind == "unknown"


@pytest.mark.parametrize("state", ["SIGNALING", "RESIZING"])
def test_a_job_that_is_just_being_signalled_is_a_running_job(state: str) -> None:
    facts = msgspec.structs.replace(facts_of("preempted_in_grace"), state=state)
    cause = decide_cause("warning", facts, own_restarts=0, signal_lead_s=60, now=EARLY)
    assert cause.kind == "preemption"
