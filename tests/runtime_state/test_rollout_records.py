"""Responses of a foreign loop in the ledger: packed and found again, durable before they are used, never mixed up."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state import ledger as ledger_module
from verl_slurm.runtime_state.ledger import Ledger, entry
from verl_slurm.runtime_state.record import unpack
from verl_slurm.runtime_state.rollout_records import (
    NotRecordable,
    Outputs,
    Responses,
    RolloutLedger,
    digest_of,
    response_entry,
    unpack_outputs,
)

OUTPUT: dict[str, Any] = {
    "prompt_ids": [5, 6, 7],
    "response_ids": [8, 9],
    "response_mask": [1, 0],
    "response_logprobs": [-0.5, float(np.float32(-1.1))],
    "reward_score": 0.25,
    "num_turns": 2,
    "metrics": {"generate_sequences": 0.125},
    "extra_fields": {
        "min_global_steps": 3,
        "reward_extra_info": {"acc": np.float32(0.5), "why": "näh", "none": None},
        "turn_scores": [],
        "scores": np.arange(6, dtype=np.float32).reshape(2, 3),
    },
}


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(private_dir(tmp_path / "run"))


def recorded(paths: RunPaths, *keys: tuple[int, int], attempt: int = 1, digest: str = "d") -> None:
    ledger = RolloutLedger(paths, attempt, 0)

    async def all_of_them() -> None:
        await asyncio.gather(*(ledger.record(*key, [OUTPUT | {"num_turns": key[0]}], digest) for key in keys))

    asyncio.run(all_of_them())
    assert ledger.recorded == len(keys), ledger.news()
    ledger.close()


def again(outputs: Outputs) -> list[dict[str, Any]]:
    """Packed and read."""
    record = response_entry(0, 0, outputs, "d").record
    return unpack_outputs(*unpack(record, Responses, where="x"), "d") or []


def test_a_response_comes_back_as_it_was() -> None:
    [found] = again([OUTPUT])
    arrays = found["extra_fields"].pop("scores")
    expected = OUTPUT["extra_fields"]["scores"]
    assert (arrays.dtype, arrays.tolist()) == (expected.dtype, expected.tolist())
    assert type(found["extra_fields"]["reward_extra_info"]["acc"]) is np.float32
    plain = {**OUTPUT, "extra_fields": {k: v for k, v in OUTPUT["extra_fields"].items() if k != "scores"}}
    assert found == plain


def test_log_probabilities_that_need_64_bits_keep_them() -> None:
    few, wide = ([float(np.float32(0.1 * n)) for n in range(999)], [0.1 * n for n in range(999)])
    assert [one["response_logprobs"] for one in again([{"response_logprobs": few}] * 2)] == [few, few]
    [found] = again([{"response_logprobs": wide}])
    assert found["response_logprobs"] == wide
    noise = np.random.default_rng(0).random(999)
    sizes = [
        len(response_entry(0, 0, [{"log_probs": numbers.tolist()}], "d").record)
        for numbers in (noise.astype(np.float32), noise)
    ]
    assert sizes[0] < sizes[1] / 1.5


@pytest.mark.parametrize("thing", [object(), {1, 2}, np.array([object()]), 1 << 70])
def test_what_msgpack_cannot_hold_is_refused_and_not_pickled(thing: object) -> None:
    with pytest.raises(NotRecordable):
        response_entry(0, 0, [OUTPUT | {"extra_fields": {"mine": thing}}], "d")
    with pytest.raises(NotRecordable):
        digest_of("agent", {"prompt": thing})


def test_tuples_and_lists_ask_the_same_and_other_parameters_do_not() -> None:
    assert digest_of("a", {"t": 1.0}, ("x",)) == digest_of("a", {"t": 1.0}, ["x"])
    assert digest_of("a", {"t": 1.0}) != digest_of("a", {"t": 0.9})


def test_a_later_attempt_finds_each_response_once_recorded(paths: RunPaths) -> None:
    recorded(paths, (0, 0), (0, 1), (7, 3))
    recorded(paths, (8, 0), attempt=2)
    later = RolloutLedger(paths, 3, 0)
    assert len(later) == 4
    found = [later.find(*key, "d") for key in ((0, 0), (0, 1), (7, 3), (8, 0), (8, 1))]
    assert [one and one[0]["num_turns"] for one in found] == [0, 0, 7, 8, None]
    assert (later.replayed, later.news()) == (4, [])


def test_what_lies_behind_dropped_records_is_still_found(paths: RunPaths) -> None:
    recorded(paths, *((position, 0) for position in range(6)))
    ledger = RolloutLedger(paths, 1, 0)  # a restart within the attempt
    other = RolloutLedger(paths, 1, 1)  # another process, which reads the same segments
    for dropped in (2, 4):
        ledger.forget(dropped)
        for each in (ledger, other):
            assert each.find(5, 0, "d")
            assert each.find(dropped - 1, 0, "d") is None
            assert each.news() == []
    for each in (ledger, other):
        each.close()


def test_another_prompt_at_the_same_position_is_sampled_and_told_once(paths: RunPaths) -> None:
    recorded(paths, (4, 0))
    later = RolloutLedger(paths, 2, 0)
    assert later.find(4, 0, "another") is None
    assert later.find(4, 0, "another") is None
    [line] = later.news()
    assert "prompt 4 is another one than in the ledger" in line
    assert later.news() == []


def test_a_record_of_our_own_trainer_is_no_response(paths: RunPaths) -> None:
    with Ledger(paths, 1, 0) as ledger:
        ledger.append(0, 0, {"tokens": np.zeros(3, dtype=np.int64)})
    later = RolloutLedger(paths, 2, 0)
    assert later.find(0, 0, "d") is None
    assert "cannot be read" in later.news()[0]


@pytest.mark.parametrize(
    "head",
    [
        [],
        {"digest": "d", "outputs": 3, "places": []},
        {"digest": "d", "outputs": [[]], "places": []},
        {"digest": ["d"], "outputs": [], "places": []},
        {"digest": "d", "outputs": [{}], "places": []},  # an array without a place
        {"digest": "d", "outputs": [{}], "places": [["pickle", [0, "x"]]]},
        *(
            {"digest": "d", "outputs": [{"x": 1}], "places": [["list", path]]}
            for path in ([], [1, "x"], ["x"])
        ),
        {"digest": "d", "outputs": [{"x": 1}], "places": [["list", [0, "x", "y"]]]},
    ],
)
def test_a_record_whose_fields_have_other_types_is_told_and_sampled_again(paths: RunPaths, head: Any) -> None:
    with Ledger(paths, 1, 0) as ledger:
        ledger.append_many([entry(0, 0, {"0": np.zeros(3)}, head)])
    later = RolloutLedger(paths, 2, 0)
    assert later.find(0, 0, "d") is None
    [line] = later.news()
    assert "holds no responses" in line or "cannot be read" in line


def test_a_record_that_makes_no_response_is_told_and_sampled_again(paths: RunPaths) -> None:
    recorded(paths, (0, 0))
    later = RolloutLedger(paths, 2, 0)
    assert later.find(0, 0, "d", lambda fields: fields["of another version"]) is None
    assert "of another version" in later.news()[0]
    assert later.replayed == 0


def test_what_waits_together_is_written_and_synced_once_and_before_it_is_used(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = RolloutLedger(paths, 1, 0)
    syncs, gate, real = [], threading.Event(), os.fdatasync

    def slow(fd: int) -> None:
        gate.wait(10)
        syncs.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)

    async def run() -> None:
        tasks = [asyncio.create_task(ledger.record(n, 0, [OUTPUT], "d")) for n in range(40)]
        await asyncio.sleep(0)  # all of them have asked
        assert not any(task.done() for task in tasks), "used before it was durable"
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert ledger.recorded == 40
    assert len(syncs) <= 3, "one for each response would be 40"
    assert syncs[-1] == paths.ledger_segment(1, 0).stat().st_size


def test_a_full_disk_costs_the_record_and_not_the_response(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = RolloutLedger(paths, 1, 0)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ledger_module.os, "pwrite", full)
        asyncio.run(ledger.record(0, 0, [OUTPUT], "d"))
        asyncio.run(ledger.record(0, 1, [OUTPUT], "d"))
    asyncio.run(ledger.record(0, 2, [OUTPUT], "d"))
    assert ledger.recorded == 1
    [line] = ledger.news()
    assert "No space left" in line
    assert "sampled again" in line


@pytest.mark.parametrize(
    "numbers", [[True, 2], [1.5, 2], [1, 2.5], [0.1, 0.5], [float("nan"), 0.5], [-(2**63), 1], []]
)
def test_numbers_of_any_kind_come_back_as_numpy_would_keep_them(numbers: list[Any]) -> None:
    [found] = again([{"response_logprobs": numbers}])
    assert np.array_equal(found["response_logprobs"], np.asarray(numbers), equal_nan=True)


@pytest.mark.parametrize(
    "odd",
    [
        {"multi_modal_data": {"images": [object()]}},
        {"response_logprobs": [0.5, None]},
        {"response_ids": [0.5, 10**400]},
        {"response_ids": [2**63]},
        {"extra_fields": {"log": "x" * (5 << 20)}},
        {"extra_fields": {"tensors": [np.zeros(1)] * 5000}},
    ],
)
def test_one_response_that_cannot_be_held_spoils_no_other(paths: RunPaths, odd: dict[str, Any]) -> None:
    ledger = RolloutLedger(paths, 1, 0)

    async def run() -> None:
        bad = OUTPUT | odd
        await asyncio.gather(*(ledger.record(n, 0, [bad if n == 1 else OUTPUT], "d") for n in range(3)))

    asyncio.run(run())
    assert ledger.recorded == 2
    [line] = ledger.news()
    assert line.startswith("responses are not recorded, and would be sampled again: ")
