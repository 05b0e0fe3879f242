from pathlib import Path

import pytest

from verl_slurm.checkpoint.decide.restore import decide_resume
from verl_slurm.checkpoint.format.info import CheckpointInfo, Kind, Problem, ProblemKind, Verdict


def info(step: int, safe_point: int = 0, kind: Kind = "committed", name: str | None = None) -> CheckpointInfo:
    name = name or f"step_{step:06d}" + (f"_sp{safe_point:04d}" if safe_point else "")
    return CheckpointInfo(kind=kind, name=name, path=Path(name), step=step, safe_point=safe_point)


def verdict(name: str, *kinds: ProblemKind) -> Verdict:
    problems = tuple(Problem(path="f", what="wrong", kind=kind) for kind in kinds)
    return Verdict(name=name, ok=not kinds, problems=problems, manifest=None, num_bytes=0, seconds=0.0)


def verdicts(**kinds: tuple[ProblemKind, ...]) -> dict[str, Verdict]:
    return {name: verdict(name, *k) for name, k in kinds.items()}


def test_the_newest_unjudged_one_is_verified_first() -> None:
    decision = decide_resume([info(1), info(2), info(2, 3)], {})
    assert (decision.action, decision.name) == ("verify", "step_000002_sp0003")


def test_a_good_one_ends_the_search() -> None:
    decision = decide_resume([info(1), info(2)], verdicts(step_000002=()))
    assert (decision.action, decision.name, decision.set_aside) == ("use", "step_000002", ())


def test_damage_leads_to_the_one_before() -> None:
    decision = decide_resume([info(1), info(2)], verdicts(step_000002=("damaged",)))
    assert (decision.action, decision.name, decision.set_aside) == ("verify", "step_000001", ("step_000002",))
    decision = decide_resume([info(1), info(2)], verdicts(step_000002=("damaged",), step_000001=()))
    assert (decision.action, decision.name) == ("use", "step_000001")


@pytest.mark.scenario("FLT-A")
@pytest.mark.parametrize("problems", [("unreadable",), ("damaged", "unreadable")])
def test_one_that_cannot_be_read_now_is_waited_for_though_an_older_one_verifies(
    problems: tuple[str, ...],
) -> None:
    decision = decide_resume([info(1), info(2)], verdicts(step_000002=problems, step_000001=()))
    assert (decision.action, decision.name, decision.set_aside) == ("wait", "step_000002", ())


def test_unreadable_ones_never_lead_to_a_start_from_nothing() -> None:
    decision = decide_resume(
        [info(1), info(2)], verdicts(step_000002=("unreadable",), step_000001=("damaged",))
    )
    assert (decision.action, decision.name) == ("wait", "step_000002")


def test_a_newer_format_is_never_passed_over() -> None:
    decision = decide_resume([info(1), info(2)], verdicts(step_000002=("version",), step_000001=()))
    assert (decision.action, decision.name) == ("refuse", "step_000002")


def test_staging_foreign_and_quarantined_entries_are_no_candidates() -> None:
    entries = [
        info(3, kind="torn", name=".step_000003.0a0b0c0d.tmp"),
        info(4, kind="quarantined", name="step_000004"),
        info(-1, kind="foreign", name="notes"),
    ]
    decision = decide_resume(entries, {})
    assert (decision.action, decision.reasons) == ("fresh", ("there is no checkpoint yet",))
