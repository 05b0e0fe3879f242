"""What wraps the two things that verl's SFT trainer holds, without a training."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.loops.verl.verl_sft_wraps import watch_checkpoints, watch_steps


class _Handler:
    """verl's checkpoint handler, as far as it is used."""

    resume_from_path = "/r/global_step_N"

    def __init__(self, step: int, state: dict[str, int] | None) -> None:
        self.train_dataloader: Any = SimpleNamespace(loaded=None)
        self.train_dataloader.load_state_dict = lambda state: setattr(self.loader, "loaded", state)
        self.loader = self.train_dataloader
        self._step, self._state = step, state
        self.written: list[int] = []

    def load_checkpoint(self) -> int:
        if self._state is not None:
            self.train_dataloader.load_state_dict(self._state)
        return self._step

    def save_checkpoint(self, step: int) -> None:
        self.written.append(step)


def saves(handler: _Handler, save: Callable[..., None] = lambda step, write: write()) -> Any:
    watch_checkpoints(handler, steps_per_epoch=8, save=save)
    return handler


def test_within_an_epoch_the_data_goes_on_where_it_was() -> None:
    handler = _Handler(6, {"at": 6})
    assert saves(handler).load_checkpoint() == 6
    assert handler.loader.loaded == {"at": 6}
    assert handler.train_dataloader is handler.loader


@pytest.mark.parametrize("step", [8, 16])
def test_at_an_epochs_end_the_next_one_begins_afresh(step: int) -> None:
    handler = _Handler(step, {"at": "the end of an iterator"})
    assert saves(handler).load_checkpoint() == step
    assert handler.loader.loaded is None


def test_a_checkpoint_that_does_not_know_where_in_the_data_it_is_is_refused() -> None:
    """verl would begin the epoch's data again, and say so in its log alone."""
    with pytest.raises(CheckpointCorrupt, match="where in the data it is from.*step 6, and no data_"):
        saves(_Handler(6, None)).load_checkpoint()


def test_a_run_from_the_beginning_needs_no_state() -> None:
    assert saves(_Handler(0, None)).load_checkpoint() == 0


def test_a_save_is_ours_around_verls() -> None:
    handler, seen = _Handler(0, None), []
    saves(handler, lambda step, write: (seen.append(step), write())).save_checkpoint(step=4)
    assert (seen, handler.written) == ([4], [4])


def test_what_is_not_watched_is_verls_own() -> None:
    worker = SimpleNamespace(train_batch=lambda data: data + 1, infer_batch=lambda data: -data)
    seen: list[int] = []
    watch_steps(worker, seen.append)
    assert (worker.train_batch(data=1), worker.infer_batch(3)) == (2, -3)
    assert seen == [2]


def test_each_batch_of_a_validation_is_told_when_it_is_done() -> None:
    done: list[str] = []
    worker = SimpleNamespace(train_batch=str, infer_batch=lambda data: done.append("inferred") or -data)
    watch_steps(worker, done.append, lambda: done.append("told"))
    assert (worker.infer_batch(3), worker.infer_batch(4)) == (-3, -4)
    assert done == ["inferred", "told"] * 2
