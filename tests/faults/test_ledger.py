"""Whatever instant the power goes: the journal holds all but the record that was being made durable.

The same disk as in `test_crash_points.py`, under the ledger; every state that a crash may leave is made real and
loaded. Syncs are as slow as they can be: done when they are waited for.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.faults.disk import crash_states
from tests.faults.tracing import Tracer
from tests.ledger_stats import ledger_stats
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.runtime_state import ledger
from verl_slurm.runtime_state.format import Arrays
from verl_slurm.runtime_state.ledger import Ledger, load
from verl_slurm.runtime_state.segment_files import BackgroundSync

_RECORDS = 4


def _batch(number: int) -> Arrays:
    return {
        "response_ids": np.full((2, 40 + number), 7 * number + 1),
        "response_mask": np.ones((2, 3), np.bool_),
    }


def _journal(paths: RunPaths, tracer: Tracer) -> None:
    """Append; acknowledge "kept N" when record N is the kernel's, "durable N" when it is to outlast the node."""
    with Ledger(paths, 1, 0) as journal:
        for number in range(_RECORDS):
            journal.append(number // 2, number, _batch(number))
            if number:
                tracer.ack(f"durable {number - 1}")
            tracer.ack(f"kept {number}")
        journal.settle()
        tracer.ack(f"durable {_RECORDS - 1}")


class _Late(BackgroundSync):
    """Does what was begun when it is waited for."""

    def __init__(self) -> None:
        self._begun: list[int] = []

    def begin(self, fd: int) -> None:
        assert not self._begun
        self._begun.append(fd)

    def wait(self) -> None:
        while self._begun:
            os.fdatasync(self._begun.pop())


def _plant(tree: dict[str, bytes | None], place: Path) -> None:
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            (place / path).mkdir(parents=True, exist_ok=True)
        else:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(content)


def test_a_power_cut_loses_at_most_the_record_that_was_being_made_durable_and_a_kill_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "BackgroundSync", _Late)
    root = tmp_path / "real"
    (root / "run").mkdir(parents=True)
    run_id(RunPaths(root / "run"))  # as a lead does
    with Tracer(root) as tracer:
        _journal(RunPaths(root / "run"), tracer)
    seen = set()
    lost_newest = 0
    for state in crash_states(tracer.start, tracer.recorded(), num_random=5):
        key = (frozenset(state.tree.items()), state.acked, state.how in {"kill", "torn"})
        if key in seen:
            continue
        seen.add(key)
        run = RunPaths(tmp_path / f"crashed{len(seen)}" / "run")
        _plant(state.tree, run.root.parent)
        found = load(run, from_step=0)  # damage would raise: a torn tail is none
        numbers = [micro_batch for _, micro_batch in found]
        assert numbers == list(range(len(numbers))), "records have gone from the middle"
        for (_, number), arrays in found.items():
            assert all((arrays[name] == values).all() for name, values in _batch(number).items())
        acked = {word: sum(ack.startswith(word) for ack in state.acked) for word in ("durable", "kept")}
        assert len(numbers) >= acked["durable"], f"after {state.after}, {state.how}"
        assert acked["kept"] - acked["durable"] <= 1
        if state.how in {"kill", "torn"}:
            assert len(numbers) >= acked["kept"], f"after {state.after}, {state.how}"
        lost_newest += len(numbers) < acked["kept"]
        if run.ledger.exists():  # and the next life of this attempt goes on behind it
            with Ledger(run, 1, 0) as next_life:
                next_life.append(9, 9, _batch(9))
            assert ledger_stats(run).problems == ()
            assert len(load(run, from_step=0)) == len(numbers) + 1
    assert len(seen) > 30
    assert lost_newest  # the one under way: the model does see what is not durable
