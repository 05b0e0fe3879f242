import errno
import os
from pathlib import Path

import pytest
import torch

from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.ledger import Ledger, load
from verl_slurm.trainer.rollout.records import record, settle, take_back
from verl_slurm.trainer.state.position import StepShape

pytestmark = pytest.mark.torch
SHAPE = StepShape(generations=2, scores=1, updates=1, dp_size=2, prompts_per_generation=4)


def _broken(fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_rollout_that_may_not_outlast_its_node_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = {"response_ids": torch.ones((4, 3), dtype=torch.int64)}
    paths = RunPaths(tmp_path)
    with Ledger(paths, 1, 0) as ledger:
        monkeypatch.setattr(os, "fdatasync", _broken)
        record(ledger, 0, 0, 0, rollouts)
        settle(ledger, 0)
        assert "may not outlast its node: [Errno 5] Input/output error" in "".join(capsys.readouterr())
        record(ledger, 0, 0, 2, rollouts)
        assert "not written to the ledger" in "".join(capsys.readouterr())
    assert load(paths, from_step=0).keys() == {(0, 0)}


def test_what_is_taken_back_is_durable_before_the_refusal_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Ledger(RunPaths(tmp_path), 1, 1) as ledger:
        synced: list[int] = []
        real = os.fdatasync
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", lambda fd: (real(fd), synced.append(fd)))
            take_back(ledger, 1, 5, SHAPE)
            assert len(synced) == SHAPE.generations
        monkeypatch.setattr(os, "fdatasync", _broken)
        take_back(ledger, 1, 6, SHAPE)
        assert "what is refused stays in the ledger" in "".join(capsys.readouterr())
