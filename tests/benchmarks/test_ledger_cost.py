import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ledger_cost
from benchmarks.ledger_cost import Append, Settled, Watched
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.ledger import Ledger


def _rollouts(count: int) -> dict[str, np.ndarray]:
    return {"response_ids": np.ones((count, 12), np.int64), "response_mask": np.ones((count, 12), np.bool_)}


def test_every_append_is_seen_with_its_bytes_and_its_sync_and_nobody_elses(tmp_path: Path) -> None:
    own = (Ledger.append, Ledger.compact, os.fdatasync)
    with ledger_cost.watched() as seen, Ledger(RunPaths(tmp_path), 1, 0) as ledger:
        empty = ledger.path.stat().st_size
        for step in (0, 1):
            ledger.append(step, 7, _rollouts(4))
            with (tmp_path / "other").open("wb") as other:
                os.fdatasync(other.fileno())
        ledger.append(1, 8, {})  # takes back
        ledger.settle()
        whole = ledger.path.stat().st_size
        ledger.compact(1)
    assert (Ledger.append, Ledger.compact, os.fdatasync) == own
    assert [(a.step, a.responses, a.syncs) for a in seen.appends] == [(0, 4, 1), (1, 4, 1), (1, 0, 1)]
    assert sum(a.bytes for a in seen.appends) == whole - empty
    assert all(a.sync_s > 0 for a in seen.appends)
    assert all(a.wait_s <= a.seconds for a in seen.appends)
    assert [w.step for w in seen.settled] == [1, 1]  # and when it was closed
    assert len(seen.compact_s) == 1


def test_the_slowest_rank_counts_and_the_first_step_does_not() -> None:
    def rank(seconds: float) -> Watched:
        appends = [Append(0, 4, 500, 9.0, 9.0, 9.0, 1, 9.0, 9.0)]
        appends += [
            Append(step, 4, 400, seconds, seconds / 2, seconds / 4, 1, 3 * seconds, seconds / 8)
            for step in (1, 2)
            for _ in range(3)
        ]
        settled = [Settled(0, 9.0), Settled(1, 0.01), Settled(2, 0.03)]
        return Watched(appends=appends, settled=settled, compact_s=[0.002])

    said = ledger_cost.figures([rank(0.01), rank(0.02)], [100.0, 2.0, 4.0])
    assert said["step_s"] == 3.0
    assert said["ledger_s_per_step"] == pytest.approx(0.08)
    assert said["percent_of_step"] == pytest.approx(100 * 0.16 / 6)
    assert said["of_which_waiting_percent"] == pytest.approx(100 * 0.1 / 6)
    assert said["percent_with_sync_cpu"] == pytest.approx(100 * 0.175 / 6)
    assert said["append_cpu_s_per_step"] == pytest.approx(0.015)
    assert said["sync_cpu_s_per_step"] == pytest.approx(0.0075)
    assert said["median_sync_ms"] == pytest.approx(45.0)
    assert said["appends_per_rank_and_step"] == said["fsyncs_per_rank_and_step"] == 3.0
    assert said["bytes_per_response"] == 100.0
    assert said["worst_append_ms"] == pytest.approx(20.0)
    assert said["compact_ms"] == pytest.approx(2.0)
