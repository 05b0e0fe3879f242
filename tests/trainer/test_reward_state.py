"""What a checkpoint keeps of the reward, and when a wish for another one is heard."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import reward_switch
from verl_slurm.base.errors import CheckpointCorrupt, Fenced
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.trainer.objective.warm_start import Affine
from verl_slurm.trainer.reward import swap as reward_swap
from verl_slurm.trainer.reward.swap import LiveReward, RewardSwap
from verl_slurm.trainer.state.position import Position, StepShape
from verl_slurm.trainer.state.resharding import reshard
from verl_slurm.trainer.state.reward_state import CACHED_ROWS, RewardState, pack, reward_record, split, unpack
from verl_slurm.trainer.state.train_state import TrainState, capture_state, fresh_state, restore_state
from verl_slurm.wire import reward_plan
from verl_slurm.wire.reward_plan import (
    RewardPlan,
    RewardRequest,
    ask_for_reward,
    read_reward_plan,
    read_reward_request,
)

pytestmark = pytest.mark.torch


def _state(rows: int = 3, first: int = 0) -> RewardState:
    ids = torch.arange(first, first + rows)
    cached = {
        "sample_id": ids,
        "response_ids": ids[:, None].repeat(1, 4),
        "response_mask": torch.ones(rows, 4, dtype=torch.bool),
        "scores": ids.float() / 7,
    }
    return RewardState(
        spec="rule:x", number=2, since_step=5, warm_steps=4, full=Affine(0.3, -1.1), cached=cached
    )


def test_what_is_unpacked_is_what_was_packed() -> None:
    state = _state()
    again = unpack(pack(state), where="x")
    assert (again.number, again.since_step, again.warm_steps, again.full) == (2, 5, 4, Affine(0.3, -1.1))
    assert {name: column.tolist() for name, column in again.cached.items()} == {
        name: column.tolist() for name, column in state.cached.items()
    }
    assert [again.map_at(step).scale for step in (5, 8, 9)] == pytest.approx([0.3, 0.3**0.25, 1.0])


def test_a_run_of_before_there_were_replacements_is_one_that_had_none() -> None:
    state = unpack({}, where="x")
    assert (state.number, state.cached) == (0, {})
    assert pack(state) == {}
    assert reward_record(replace(state, spec="rule:x"), 3) == {
        "reward": "rule:x",
        "since_step": 0,
        "replacements": 0,
        "warm_start_steps_left": 0,
        "scale": 1.0,
        "offset": 0.0,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"switch": np.array([1.0, 0, 0])},
        {"switch": np.array([1.0, 0, 0, np.nan, 0])},
        {"switch": np.array([-1.0, 0, 0, 1, 0])},
        {"switch": np.array([1, 0, 0, 1, 0])},
        {"cached.scores": np.zeros(2, np.float32)},
        {"cached.scores": np.zeros(3)},
        {"cached.response_ids": np.zeros(3, np.int64)},
        {"cached.more": np.zeros(3, np.float32)},
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, np.ndarray]) -> None:
    with pytest.raises(CheckpointCorrupt, match="contradicts itself"):
        unpack(pack(_state()) | changes, where="x")


def test_the_last_scores_are_kept_as_the_training_saw_them_and_not_more_than_needed() -> None:
    rows = CACHED_ROWS + 5
    rollouts = {
        "sample_id": torch.arange(rows),
        "prompt_ids": torch.zeros(rows, 2),
        "response_ids": torch.zeros(rows, 4, dtype=torch.int64),
        "response_mask": torch.ones(rows, 4, dtype=torch.bool),
    }
    kept = RewardState().remember(
        rollouts, {"scores": torch.arange(float(rows)), "old_values": torch.zeros(rows)}
    )
    assert kept.cached["scores"].tolist() == [float(row) for row in range(CACHED_ROWS)]
    assert set(kept.cached) == {"sample_id", "response_ids", "response_mask", "scores"}


def test_it_travels_in_the_runtime_state_and_to_another_number_of_ranks() -> None:
    config = RunConfig()
    shape = StepShape.of(config)
    saved = []
    for rank in range(2):
        state = fresh_state(config)
        state.position, state.reward = Position(7), _state(3, first=3 * rank)
        saved.append(capture_state(state, shape, rank=rank))
    restored = restore_state(saved[1], config, shape, where="x")
    assert restored.reward.cached["sample_id"].tolist() == [3, 4, 5]
    assert restored.buffers.scored == []
    wider = replace(shape, dp_size=4, generations=shape.generations // 2)
    parts = [split(reshard(saved, shape, wider, rank).rewards)[0] for rank in range(4)]
    assert sorted(int(i) for part in parts for i in part["cached.sample_id"]) == list(range(6))
    assert all(part["switch"].tolist() == [2, 5, 4, 0.3, -1.1] for part in parts)


def _swap(root: Path, plan: RewardPlan | None = None, **options: Any) -> RewardSwap:
    said: list[str] = []
    anything: Any = SimpleNamespace(complain=said.append, notice=said.append)
    return RewardSwap(
        paths=RunPaths(root),
        attempt=1,
        ranks=options.pop("ranks", Collective(None)),
        reporter=anything,
        plan=plan or RewardPlan(),
        live=LiveReward(anything),
        texts=lambda batch: ([""] * len(batch["scores"]),) * 3,
        keep=None,
        **options,
    )


def test_a_record_that_cannot_be_written_leaves_the_old_reward_and_none_may_be_left_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path)
    take_attempt(paths, job_id="test", restart=0)
    ask_for_reward(paths, "rule:arithmetic", 1)
    wish = read_reward_request(paths)
    assert wish is not None
    kept = reward_plan.write_reward_plan
    failures = 1

    def write(where: RunPaths, plan: RewardPlan) -> None:
        nonlocal failures
        kept(where, plan)  # on disk it is; but nobody can say so
        if failures:
            failures -= 1
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(reward_swap, "write_reward_plan", write)
    swap, state = _swap(tmp_path), _at(4)
    swap.perform(wish, state)
    assert state.reward.number == 0
    plan = read_reward_plan(paths)
    assert (plan.switches, plan.handled) == ((), 1)
    assert "Input/output error" in plan.refused
    failures = 2
    with pytest.raises(RanksFailed):
        _swap(tmp_path).perform(wish, state)


def test_an_attempt_that_was_fenced_off_records_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for _ in range(2):
        take_attempt(paths, job_id="test", restart=0)
    ask_for_reward(paths, "rule:arithmetic", 1)
    wish = read_reward_request(paths)
    assert wish is not None
    with pytest.raises(Fenced):
        _swap(tmp_path).perform(wish, _at(4))
    assert not paths.reward_plan.exists()


def test_a_replicas_responses_count_once_however_many_ranks_it_has(tmp_path: Path) -> None:
    class Told(Collective):
        def sum(self, values: Sequence[float]) -> list[float]:
            sums.append(list(values))
            return [6.0, 6.0, 3.0] if len(values) == 3 else [4.0, 1.0]

    due = reward_switch("rule:x", 4, warm_start_steps=2, replaced="y")

    def rule(*_: object) -> torch.Tensor:
        return torch.arange(3.0)

    found = []
    for counts in (True, False):
        sums: list[list[float]] = []
        state = _at(4)
        state.reward = replace(_state(3), number=0)
        _swap(tmp_path, ranks=Told(None), counts=counts, load=lambda *_, **__: rule).perform(due, state)
        assert sums[0][0] == (3.0 if counts else 0.0)
        assert any(sums[1]) is counts
        found.append(state.reward.full)
    assert found[0] == found[1]


def test_a_reward_that_tosses_coins_is_refused(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    take_attempt(paths, job_id="test", restart=0)
    source = "import itertools\nn = itertools.count()\ndef score(p, r, a): return [next(n) for _ in r]\n"
    (tmp_path / "coin.py").write_text(source)
    ask_for_reward(paths, f"python:{tmp_path / 'coin.py'}:score", 1)
    wish = read_reward_request(paths)
    assert wish is not None
    state = _at(4)
    state.reward = replace(_state(), number=0)
    _swap(tmp_path).perform(wish, state)
    assert "other scores for the same texts" in read_reward_plan(paths).refused
    assert state.reward.spec == "rule:x"


def _at(step: int, number: int = 0) -> TrainState:
    state = fresh_state(RunConfig())
    state.position, state.reward = Position(step), RewardState(number=number)
    return state


def test_a_wish_is_heard_at_the_start_after_the_first_step_and_when_the_daemon_says_so(
    tmp_path: Path,
) -> None:
    swap = _swap(tmp_path)
    assert swap.due(_at(4), -1) is None
    ask_for_reward(RunPaths(tmp_path), "rule:a", 1)
    middle = _at(4)
    middle.position = Position(4, "score")
    assert swap.due(middle, -1) is None  # not in the midst of a step
    heard = swap.due(_at(5), -1)
    assert isinstance(heard, RewardRequest)
    assert heard.reward == "rule:a"
    assert swap.due(_at(6), -1) is None  # once
    ask_for_reward(RunPaths(tmp_path), "rule:b", 1)
    assert swap.due(_at(7), -1) is None  # nobody looks at the storage unasked
    swap.look()
    assert isinstance(swap.due(_at(7), -1), RewardRequest)


def test_a_wish_waits_until_the_run_is_past_what_it_replays(tmp_path: Path) -> None:
    ask_for_reward(RunPaths(tmp_path), "rule:a", 1)
    swap = _swap(tmp_path)
    assert swap.due(_at(4), 6) is None
    assert swap.due(_at(5), 6) is None
    assert swap.due(_at(6), 6) is None
    assert isinstance(swap.due(_at(7), -1), RewardRequest)


def test_what_is_recorded_is_done_at_its_step_and_before_any_new_wish(tmp_path: Path) -> None:
    ask_for_reward(RunPaths(tmp_path), "rule:a", 1)
    ask_for_reward(RunPaths(tmp_path), "rule:b", 1)
    switch = reward_switch("rule:a", 5)
    swap = _swap(tmp_path, RewardPlan(handled=1, switches=(switch,)))
    assert swap.due(_at(4), 9) is None
    assert swap.due(_at(5), 9) == switch  # replayed or not: so it was
    assert swap.due(_at(6, number=1), 9) is None
    assert isinstance(swap.due(_at(10, number=1), 9), RewardRequest)
    answered = _swap(tmp_path, RewardPlan(handled=2, switches=(switch,)))
    assert answered.due(_at(6, number=1), -1) is None
