"""How a run of verl's SFT trainer is judged: by the step it reached, since verl ends with 0 in any case."""

from types import SimpleNamespace
from typing import Any

import pytest

from verl_slurm.errors import VerlSlurmError
from verl_slurm.guest.session import Session
from verl_slurm.paths import RunPaths
from verl_slurm.verl.sft import _last_words
from verl_slurm.wire.messages import Finished, Stopped
from verl_slurm.wire.stopping import Order


class _Line:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)

    def request(self) -> None:
        return None


def ended(step: int, *, saved: int, began: int = 0, order: Order | None = None) -> list[Any]:
    line = _Line()
    session = Session(line, rank=1, world_size=2, paths=RunPaths("/runs/one"))
    trainer = SimpleNamespace(step=step, total=16, is_done=step >= 16, order=order)
    _last_words(session, trainer, SimpleNamespace(saved_step=saved), began)
    return line.heard


def test_the_last_step_done_and_committed_is_the_end() -> None:
    assert ended(16, saved=16) == [Finished(rank=1, step=16)]


def test_a_request_in_the_last_step_changes_nothing_about_that() -> None:
    assert ended(16, saved=16, order=Order(request_id=3, stop=True)) == [Finished(rank=1, step=16)]


def test_it_leaves_as_asked() -> None:
    assert ended(7, saved=7, order=Order(request_id=3, stop=True)) == [Stopped(rank=1, request_id=3)]


@pytest.mark.parametrize(
    ("step", "saved", "began", "words"),
    [
        (8, 8, 8, r"without a single step.*found step 8, expected step 16"),
        (12, 8, 8, r"before its last step.*found step 12, expected step 16"),
        (16, 8, 8, r"could not be saved.*newest save is of step 8"),
    ],
    ids=["an epoch of no steps", "too few epochs", "the last save failed"],
)
def test_anything_else_is_a_crash_with_words(step: int, saved: int, began: int, words: str) -> None:
    with pytest.raises(VerlSlurmError, match=words):
        ended(step, saved=saved, began=began)
