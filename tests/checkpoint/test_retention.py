from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from verl_slurm.checkpoint.decide.retention import plan_prune
from verl_slurm.checkpoint.format.info import CheckpointInfo, Kind


def infos(*steps: int, kind: Kind = "committed") -> list[CheckpointInfo]:
    return [
        CheckpointInfo(kind=kind, name=f"step_{s:06d}", path=Path(f"step_{s:06d}"), step=s, safe_point=0)
        for s in steps
    ]


def test_the_newest_few_are_kept_each_with_a_reason() -> None:
    plan = plan_prune(infos(1, 4, 2, 3), 2)
    assert [(k.name, k.reason) for k in plan.keep] == [
        ("step_000004", "number 1 of the newest 2"),
        ("step_000003", "number 2 of the newest 2"),
    ]
    assert [d.name for d in plan.drop] == ["step_000002", "step_000001"]
    assert all(d.reason for d in plan.drop)
    assert not plan.assured


def test_only_verified_ones_count_when_that_is_known() -> None:
    plan = plan_prune(infos(1, 2, 3, 4), 1, verified={"step_000002", "step_000001"})
    assert [k.name for k in plan.keep] == ["step_000004", "step_000003", "step_000002"]
    assert [d.name for d in plan.drop] == ["step_000001"]
    assert plan.assured


def test_the_newest_verified_is_never_dropped_and_keep_and_drop_are_all() -> None:
    names = [i.name for i in infos(1, 2, 3, 4)]
    for good, keep_last in product(product([False, True], repeat=4), (1, 2, 3, 9)):
        verified = {n for n, g in zip(names, good, strict=True) if g}
        plan = plan_prune(infos(1, 2, 3, 4), keep_last, verified=verified)
        kept, dropped = {k.name for k in plan.keep}, {d.name for d in plan.drop}
        assert kept | dropped == set(names)
        assert not kept & dropped
        assert not verified or max(verified) in kept
        assert verified or not dropped


def test_so_many_verified_ones_are_kept_and_the_others_still_count() -> None:
    def dropped(keep_last: int, *verified: str) -> list[str]:
        plan = plan_prune(infos(1, 2, 3, 4, 5), keep_last, verified=set(verified), num_verified=2)
        assert plan.assured or not plan.drop
        return [d.name for d in plan.drop]

    assert dropped(3, "step_000005", "step_000004") == ["step_000002", "step_000001"]
    assert dropped(1, "step_000005", "step_000004") == ["step_000003", "step_000002", "step_000001"]
    assert dropped(1, "step_000005", "step_000002") == ["step_000001"]
    assert dropped(3, "step_000005") == []
    assert dropped(3) == []


def test_what_is_in_use_stays_and_what_is_not_committed_is_not_planned() -> None:
    plan = plan_prune([*infos(1, 2, 3), *infos(9, kind="torn")], 1, protected={"step_000001"})
    assert {k.name for k in plan.keep} == {"step_000003", "step_000001"}
    assert {d.name for d in plan.drop} == {"step_000002"}


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_prune(infos(1), 0)
    with pytest.raises(ValueError, match="at least 1"):
        plan_prune(infos(1), 1, verified={"step_000001"}, num_verified=0)


def test_one_in_every_so_many_steps_is_kept_for_ever_and_says_so() -> None:
    plan = plan_prune(infos(*range(10, 101, 10)), 2, keep_every=30)
    assert [(k.name, k.reason) for k in plan.keep] == [
        ("step_000100", "number 1 of the newest 2"),
        ("step_000090", "number 2 of the newest 2"),
        ("step_000060", "the first from step 60 on, one in every 30 is kept for ever"),
        ("step_000030", "the first from step 30 on, one in every 30 is kept for ever"),
    ]
    assert plan.drop[0].reason == "older than the newest 2 and none of every 30"


def test_where_no_save_falls_on_a_multiple_the_first_after_it_stands_for_it() -> None:
    plan = plan_prune(infos(7, 24, 26, 31, 49, 77, 80, 99), 1, keep_every=25)
    assert [k.name for k in plan.keep] == ["step_000099", "step_000077", "step_000026"]


def test_what_is_kept_for_ever_is_none_that_the_run_goes_on_from() -> None:
    plan = plan_prune(infos(10, 20, 30, 40), 2, keep_every=10)
    assert plan.drop == ()
    assert plan.working == {"step_000040", "step_000030"}
    plan = plan_prune(infos(10, 20, 30), 1, keep_every=10, verified={"step_000020"}, num_verified=1)
    assert plan.working == {"step_000030", "step_000020"}


def test_keep_last_one_keeps_two_while_the_newest_has_not_been_read_back() -> None:
    """As the trainer asks: two that are known to be whole must stay."""
    plan = plan_prune(infos(1, 2, 3), 1, verified={"step_000002", "step_000003"}, num_verified=2)
    assert [(k.name, k.reason) for k in plan.keep] == [
        ("step_000003", "number 1 of the newest 1"),
        ("step_000002", "of the newer ones 1 are known to be whole, before that is 2 nothing goes"),
    ]


def test_a_keep_every_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        plan_prune(infos(1), 1, keep_every=-1)


steps = st.sets(st.integers(1, 60), min_size=1, max_size=30)


@given(steps, st.integers(1, 5), st.integers(0, 20), st.integers(1, 3), st.data())
def test_the_newest_verified_is_never_dropped_whatever_else_is_kept(
    found: set[int], keep_last: int, keep_every: int, num_verified: int, data: st.DataObject
) -> None:
    names = [info.name for info in infos(*found)]
    verified = data.draw(st.sets(st.sampled_from(names)))
    plan = plan_prune(
        infos(*found), keep_last, keep_every=keep_every, verified=verified, num_verified=num_verified
    )
    kept, dropped = [k.name for k in plan.keep], [d.name for d in plan.drop]
    assert sorted([*kept, *dropped]) == sorted(names)
    assert kept == sorted(kept, reverse=True)
    assert not verified or max(verified) in kept
    assert not dropped or len(set(kept) & verified) >= num_verified
    assert max(names) in kept
    assert max(names) in plan.working
    assert plan.working <= set(kept)


@given(steps, st.integers(1, 4), st.integers(1, 20))
def test_pruning_after_every_save_keeps_the_same_for_ever_as_pruning_once(
    found: set[int], keep_last: int, keep_every: int
) -> None:
    left: set[int] = set()
    for step in sorted(found):
        left.add(step)
        dropped = {d.name for d in plan_prune(infos(*left), keep_last, keep_every=keep_every).drop}
        left -= {s for s in left if f"step_{s:06d}" in dropped}
    once = plan_prune(infos(*found), keep_last, keep_every=keep_every)
    assert sorted(f"step_{s:06d}" for s in left) == sorted(k.name for k in once.keep)
