"""Who owns a run."""

import multiprocessing
import os
from pathlib import Path

import pytest

from verl_slurm.errors import Fenced
from verl_slurm.fence import read_epoch, require_epoch, take_epoch
from verl_slurm.paths import RunPaths


def test_each_incarnation_gets_the_next_number_and_closes_the_one_before(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    first = take_epoch(paths, job_id="5", restart=0)
    require_epoch(paths, first.epoch)
    second = take_epoch(paths, job_id="5", restart=1)
    assert (first.epoch, second.epoch) == (1, 2)
    with pytest.raises(Fenced, match="no longer owns"):
        require_epoch(paths, first.epoch)


def test_a_run_without_an_epoch_lets_nobody_write(tmp_path: Path) -> None:
    with pytest.raises(Fenced):
        require_epoch(RunPaths(tmp_path), 1)


def _take(root: str, queue: "multiprocessing.Queue[int]") -> None:
    try:
        queue.put(take_epoch(RunPaths(root), job_id=str(os.getpid()), restart=0).epoch)
    except Fenced:
        queue.put(0)


def test_of_many_who_start_at_once_no_two_get_the_same_epoch(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for round_number in range(20):
        root = tmp_path / str(round_number)
        queue = context.Queue()
        racers = [context.Process(target=_take, args=(str(root), queue)) for _ in range(4)]
        for racer in racers:
            racer.start()
        epochs = [queue.get(timeout=30) for _ in racers]
        for racer in racers:
            racer.join()
        won = [epoch for epoch in epochs if epoch]
        assert won, "somebody must win"
        assert len(set(won)) == len(won)
        owner = read_epoch(RunPaths(root))
        assert owner is not None


def test_a_claim_whose_owner_was_killed_at_once_does_not_block_the_run_for_ever(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    take_epoch(paths, job_id="1", restart=0)
    claim = paths.control / "epoch_000002.claim"
    claim.touch()
    with pytest.raises(Fenced):
        take_epoch(paths, job_id="2", restart=0)
    os.utime(claim, (0, 0))
    assert take_epoch(paths, job_id="2", restart=0).epoch == 3
