import errno
import os
import time
from pathlib import Path

import pytest
import torch

from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.ledger import Ledger, load
from verl_slurm.trainer.rollout.records import RolloutRecorder
from verl_slurm.trainer.state.position import StepShape

pytestmark = pytest.mark.torch
SHAPE = StepShape(generations=2, scores=1, updates=1, dp_size=2, prompts_per_generation=4)


def _broken(fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_rollouts_that_the_ledger_does_not_take_are_told_and_it_takes_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, told, now = {"response_ids": torch.ones((4, 3), dtype=torch.int64)}, list[str](), [1000.0]
    paths = RunPaths(tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Ledger(paths, 1, 0) as ledger:
        recorder = RolloutRecorder(ledger, 0, told.append)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", _broken)
            recorder.record(0, 0, rollouts)
            recorder.settle()
            assert (
                told.pop()
                == "dp rank 0: the newest rollout may not outlast its node: [Errno 5] Input/output error"
            )
            patch.setattr(os, "fsync", _broken)
            recorder.record(0, 2, rollouts)
            assert "takes no rollouts: [Errno 5]" in told.pop()
            now[0] += 1
            recorder.record(0, 4, rollouts)
        assert not told, "it is told once"
        now[0] += 60
        recorder.record(0, 6, rollouts)
        assert told.pop() == "dp rank 0: the ledger takes rollouts again; it lacks 2 micro-batches"
        recorder.record(1, 0, rollouts)
    assert not told
    assert load(paths, from_step=0).keys() == {(0, 0), (0, 6), (1, 0)}


def test_what_is_taken_back_is_durable_before_the_refusal_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    with Ledger(RunPaths(tmp_path), 1, 1) as ledger:
        recorder, synced, real = RolloutRecorder(ledger, 1, told.append), list[int](), os.fdatasync
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", lambda fd: (real(fd), synced.append(fd)))
            recorder.take_back(5, SHAPE)
            assert len(synced) == SHAPE.generations
        monkeypatch.setattr(os, "fdatasync", _broken)
        recorder.take_back(6, SHAPE)
        assert "what is refused stays in the ledger" in told.pop()
