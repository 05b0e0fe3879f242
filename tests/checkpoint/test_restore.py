import pytest
from hypothesis import given, strategies as st

from tests.builders import make_manifest
from verl_slurm.checkpoint.decide.restore import decide_resume
from verl_slurm.checkpoint.format.info import Problem, ProblemKind, Verdict

KINDS: tuple[ProblemKind, ...] = ("damaged", "unreadable", "untrusted", "version", "key", "extra")


def verdict(name: str, kinds: list[ProblemKind], has_manifest: bool) -> Verdict:
    problems = tuple(Problem(path="f", what="wrong", kind=kind) for kind in kinds)
    manifest = make_manifest(name=name) if has_manifest else None
    return Verdict(name=name, ok=not kinds, problems=problems, manifest=manifest, num_bytes=0, seconds=0.0)


@pytest.mark.scenario("FLT-A")
@given(st.lists(st.tuples(st.lists(st.sampled_from(KINDS), max_size=2), st.booleans()), max_size=6))
def test_the_newest_that_verifies_is_used_and_none_that_may_be_good_is_passed_over(
    problems: list[tuple[list[ProblemKind], bool]],
) -> None:
    """`problems`: of each checkpoint, newest first, and whether its manifest verified; no problem: it is good."""
    names = [f"step_{9 - place:06d}" for place in range(len(problems))]
    found = {name: verdict(name, *one) for name, one in zip(names, problems, strict=True)}
    asked: dict[str, Verdict] = {}
    entries = [*reversed(names), ".step_000012.0a0b0c0d.tmp", "quarantine", "notes", "latest"]
    while (decision := decide_resume(entries, asked)).action == "verify":
        assert decision.name is not None
        asked[decision.name] = found[decision.name]
    # Each that was read, newest first, and nothing older than the one that ends it.
    assert list(asked) == names[: len(asked)]
    read = [found[name] for name in asked]
    assert decision.set_aside == tuple(one.name for one in read if one.damaged)
    is_last = bool(read) and decision.name == read[-1].name
    passed_over = read[:-1] if is_last or len(read) < len(names) else read
    assert not any(one.unreadable for one in passed_over)
    # Every byte of it is as it was saved, and the next command makes it good.
    assert not any(one.is_open or one.is_whole for one in passed_over)
    if decision.action == "use":
        assert read[-1].is_whole
        assert decision.name == read[-1].name
    elif decision.action == "wait":
        assert read[-1].unreadable
    elif decision.action == "fresh":
        assert all(one.damaged for one in found.values())
        assert decision.reasons[-1] == ("no checkpoint verifies" if names else "there is no checkpoint yet")
    else:
        assert decision.name is not None
        assert not found[decision.name].damaged
        assert not found[decision.name].is_whole


def test_a_later_safe_point_is_newer() -> None:
    decision = decide_resume(["step_000001", "step_000002", "step_000002_sp0003"], {})
    assert (decision.action, decision.name) == ("verify", "step_000002_sp0003")
