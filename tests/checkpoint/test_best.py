"""The best checkpoints by a metric, and what retention makes of them."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.builders import checkpoint_info
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.best import Best, is_new_best, metrics_of, rank_best
from verl_slurm.checkpoint.decide.retention import plan_prune
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.manifest import parse, render
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.pruning import look
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config.schema import CheckpointConfig

BEST = Best(keep=2)


def infos(*values: float | None) -> list[CheckpointInfo]:
    """Of steps 1, 2, ...; None: that step was not evaluated."""
    return [
        checkpoint_info(step, metrics={"reward": 0.5} | ({} if value is None else {"eval/reward": value}))
        for step, value in enumerate(values, start=1)
    ]


def test_the_best_are_ranked_by_value_and_of_equal_ones_the_earlier_is_better() -> None:
    ranks = rank_best(infos(0.1, 0.7, None, 0.9, 0.7), Best(keep=3))
    assert [(name, rank.number, rank.value) for name, rank in ranks.items()] == [
        ("step_000004", 1, 0.9),
        ("step_000002", 2, 0.7),
        ("step_000005", 3, 0.7),
    ]
    least = rank_best(infos(0.1, 0.7, None, 0.9), Best(keep=1, mode="min"))
    assert list(least) == ["step_000001"]


def test_only_what_is_committed_and_has_the_metric_can_be_best() -> None:
    torn = replace(infos(9.0)[0], kind="torn", name=".step_000001.0123456789abcdef.tmp")
    assert rank_best([torn, *infos(None, None)], BEST) == {}
    assert rank_best(infos(0.5), Best(keep=0)) == {}
    assert set(rank_best(infos(0.5, None), Best(keep=5, metric="reward"))) == {"step_000001", "step_000002"}


def test_retention_keeps_the_best_and_says_the_value_for_and_against() -> None:
    plan = plan_prune(infos(0.9, 0.2, None, 0.8, 0.3, 0.1), 1, best=BEST, verified={"step_000006"})
    assert [(item.name, item.reason) for item in plan.keep] == [
        ("step_000006", "number 1 of the newest 1"),
        ("step_000004", "number 2 of the best 2 by eval/reward: 0.8"),
        ("step_000001", "number 1 of the best 2 by eval/reward: 0.9"),
    ]
    assert [(item.name, item.reason) for item in plan.drop] == [
        ("step_000005", "older than the newest 1 and with eval/reward 0.3 not among the best 2"),
        ("step_000003", "older than the newest 1 and without eval/reward"),
        ("step_000002", "older than the newest 1 and with eval/reward 0.2 not among the best 2"),
    ]
    # A result, not what the run goes on from: its rollouts need not be kept.
    assert plan.working == {"step_000006"}


def by_reward(info: CheckpointInfo, number: float) -> CheckpointInfo:
    return replace(info, metrics=info.metrics | {"reward_number": number})


def test_by_another_reward_the_best_start_over_with_its_first_number() -> None:
    before = infos(90.0, 80.0, 70.0)
    after = [by_reward(info, 1.0) for info in infos(None, None, None, None, 0.2, 0.3)[3:]]
    assert set(rank_best([*before, after[0]], BEST)) == {"step_000001", "step_000002"}, "not evaluated yet"
    assert set(rank_best([*before, *after], BEST)) == {"step_000005", "step_000006"}
    plan = plan_prune([*before, *after], 1, best=BEST)
    assert {item.name: item.reason for item in plan.drop}["step_000001"] == (
        "older than the newest 1 and with eval/reward 90 by a reward that was replaced"
    )


def test_by_another_reward_a_lower_number_is_a_new_best() -> None:
    rows = [{"eval/reward": 90.0}, {"eval/reward": 0.2, "reward_number": 1.0}]
    assert is_new_best(rows, BEST)
    assert not is_new_best([*rows, {"eval/reward": 0.1, "reward_number": 1.0}], BEST)


@given(
    values=st.lists(st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=9),
    keep_last=st.integers(1, 4),
    keep_best=st.integers(0, 4),
    keep_every=st.integers(0, 4),
    mode=st.sampled_from(["max", "min"]),
)
def test_none_that_goes_is_better_than_one_that_stays_for_being_good(
    values: list[float | None], keep_last: int, keep_best: int, keep_every: int, mode: str
) -> None:
    found = infos(*values)
    best = Best(keep=keep_best, mode=mode)  # type: ignore[arg-type]
    plan = plan_prune(found, keep_last, keep_every=keep_every, best=best)
    kept, dropped = ({item.name for item in items} for items in (plan.keep, plan.drop))
    assert kept | dropped == {info.name for info in found}
    assert not kept & dropped
    ranked = rank_best(found, best)
    assert set(ranked) <= kept
    of = {info.name: info.metrics.get("eval/reward") for info in found}
    lost = [value for name in dropped if (value := of[name]) is not None]
    assert not any(best.beats(value, rank.value) for value in lost for rank in ranked.values())
    if lost:
        assert len(ranked) == keep_best
    # And without the rule, the rest of the plan is what it was.
    plain = plan_prune(found, keep_last, keep_every=keep_every)
    assert kept == {item.name for item in plain.keep} | set(ranked)


@pytest.mark.parametrize(
    ("values", "new"),
    [([0.1], True), ([0.1, 0.3, 0.2], False), ([0.1, None], False), ([None, 0.2], True), ([0.2, 0.2], False)],
)
def test_a_step_is_saved_for_a_new_best_of_the_evaluation(values: list[float | None], new: bool) -> None:
    rows = [{"step": 1.0, "reward": 2.0} | ({} if v is None else {"eval/reward": v}) for v in values]
    assert is_new_best(rows, BEST) is new
    assert not is_new_best(rows, Best(keep=0))
    assert not is_new_best(rows, Best(keep=1, metric="reward")), "every step has one"


def test_what_is_no_number_is_no_best() -> None:
    rows = [{"eval/reward": math.nan}, {"eval/reward": 0.1}]
    assert is_new_best(rows, BEST)
    assert not is_new_best([*rows, {"eval/reward": math.nan}], BEST)
    assert metrics_of({"step": 3.0, "kl": math.nan, "loss": math.inf, "reward": 1.0}) == {"reward": 1.0}


def test_the_metrics_are_in_the_manifest_and_the_catalog_has_them(
    save: Callable[..., Path], paths: RunPaths
) -> None:
    save(1, metrics={"eval/reward": 0.75, "reward": 0.5})
    save(1, 3)
    manifest = read_manifest(paths.checkpoint(1))
    assert manifest.metrics == {"eval/reward": 0.75, "reward": 0.5}
    assert parse(render(manifest), where="here") == manifest
    assert b'"metrics"' not in (paths.checkpoint(1, 3) / "manifest.json").read_bytes()
    assert {i.name: i.metrics for i in list_checkpoints(paths)} == {
        "step_000001": {"eval/reward": 0.75, "reward": 0.5},
        "step_000001_sp0003": {},
    }


def test_pruning_by_hand_spares_the_best(save: Callable[..., Path], paths: RunPaths) -> None:
    for step, value in ((1, 0.9), (2, 0.1), (3, 0.2)):
        save(step, metrics={"eval/reward": value})
    best = Best.of(CheckpointConfig(keep_best=1))
    assert [item.name for item in look(paths, 1, best=best).plan.drop] == ["step_000002"]
    assert [item.name for item in look(paths, 1).plan.drop] == ["step_000002", "step_000001"]
