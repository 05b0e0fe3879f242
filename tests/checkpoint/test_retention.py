from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from verl_slurm.checkpoint.decide.retention import plan_prune
from verl_slurm.checkpoint.format.info import CheckpointInfo, Kind


def infos(*steps: int, kind: Kind = "committed") -> list[CheckpointInfo]:
    return [
        CheckpointInfo(kind=kind, name=name(step), path=Path(name(step)), step=step, safe_point=0)
        for step in steps
    ]


def name(step: int) -> str:
    return f"step_{step:06d}"


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"num_verified": 0}, {"keep_every": -1}])
def test_keeping_none_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        plan_prune(infos(1), **({"keep_last": 1} | wrong))  # type: ignore[arg-type]


def test_each_is_kept_and_dropped_for_a_reason() -> None:
    plan = plan_prune(infos(*range(10, 101, 10)), 2, keep_every=30, protected={name(50)})
    assert [(k.name, k.reason) for k in plan.keep] == [
        ("step_000100", "number 1 of the newest 2"),
        ("step_000090", "number 2 of the newest 2"),
        ("step_000060", "the first from step 60 on, one in every 30 is kept for ever"),
        ("step_000050", "in use"),
        ("step_000030", "the first from step 30 on, one in every 30 is kept for ever"),
    ]
    assert plan.drop[0].reason == "older than the newest 2 and none of every 30"
    assert not plan.assured
    # As the trainer asks: two that are known to be whole must stay.
    plan = plan_prune(infos(1, 2, 3), 1, verified={name(2), name(3)}, num_verified=2)
    assert [(k.name, k.reason) for k in plan.keep] == [
        ("step_000003", "number 1 of the newest 1"),
        ("step_000002", "of the newer ones 1 are known to be whole, before that is 2 nothing goes"),
    ]


steps = st.sets(st.integers(1, 60), min_size=1, max_size=30)


@given(steps, st.integers(1, 5), st.integers(0, 20), st.integers(1, 3), st.data())
def test_kept_are_the_newest_those_until_enough_are_whole_one_in_every_so_many_and_those_in_use(
    found: set[int], keep_last: int, keep_every: int, num_verified: int, data: st.DataObject
) -> None:
    newest_first = sorted(found, reverse=True)
    some = st.sets(st.sampled_from(newest_first))
    verified, protected = data.draw(st.none() | some), data.draw(some)
    plan = plan_prune(
        [*infos(*found), *infos(99, kind="torn")],
        keep_last,
        keep_every=keep_every,
        verified=None if verified is None else {name(step) for step in verified},
        num_verified=num_verified,
        protected={name(step) for step in protected},
    )
    working, good = set(newest_first[:keep_last]), 0
    if verified is not None:
        working |= {s for s in newest_first if len({v for v in verified if v > s}) < num_verified}
        good = len(verified & {int(k.name[5:]) for k in plan.keep})
    # Where no save falls on a multiple the first after it stands for it.
    multiples = {step // keep_every for step in found} - {0} if keep_every else set()
    for_ever = {min(step for step in found if step // keep_every == number) for number in multiples}
    kept = working | for_ever | protected
    assert [k.name for k in plan.keep] == [name(step) for step in newest_first if step in kept]
    assert [d.name for d in plan.drop] == [name(step) for step in newest_first if step not in kept]
    # From one that is kept for ever no run goes on.
    assert plan.working == {name(step) for step in working}
    assert plan.assured == (good >= num_verified)
    assert not plan.drop or verified is None or plan.assured


@given(steps, st.integers(1, 4), st.integers(1, 20))
def test_pruning_after_every_save_keeps_the_same_for_ever_as_pruning_once(
    found: set[int], keep_last: int, keep_every: int
) -> None:
    left: set[int] = set()
    for step in sorted(found):
        left.add(step)
        dropped = {d.name for d in plan_prune(infos(*left), keep_last, keep_every=keep_every).drop}
        left -= {step for step in left if name(step) in dropped}
    once = plan_prune(infos(*found), keep_last, keep_every=keep_every)
    assert sorted(map(name, left)) == sorted(k.name for k in once.keep)
