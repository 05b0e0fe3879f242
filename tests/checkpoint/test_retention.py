from itertools import product
from pathlib import Path

import pytest

from verl_slurm.checkpoint.info import CheckpointInfo, Kind
from verl_slurm.checkpoint.retention import plan_prune


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
