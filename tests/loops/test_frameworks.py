"""Frameworks as guests, in this process: asked, stopped, killed, resumed, done. Each one's own is in its file."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.daemon import Daemon
from tests.loops.frames_kit import Run, save, stop
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.wire.messages import Finished, RankSaved

# Warnings of Lightning's own, of all kinds.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::Warning")]

FILES = {"huggingface": "trainer_state.json", "lightning": "lightning.ckpt"}


@pytest.fixture(params=FILES)
def framework(request: pytest.FixtureRequest) -> Any:
    """The module of its tests."""
    return import_module(f"tests.loops.test_{request.param}")


def test_asked_to_stop_it_saves_at_the_end_of_the_step_and_leaves(tmp_path: Path, framework: Any) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon({4: stop()})
    assert framework.Life(run.life(daemon)).stopped
    assert daemon.kinds() == ["SaveStarted", "PartSaved", "RankSaved", "Stopped"]
    [saved] = daemon.heard(RankSaved)
    assert (saved.name, saved.request_id, saved.on_shared) == ("step_000004", 1, True)
    [checkpoint] = run.checkpoints()
    verdict = verify(checkpoint)
    assert verdict.ok, verdict.one_line()
    assert verdict.manifest is not None
    assert (verdict.manifest.guest, verdict.manifest.step) == ("loop", 4)
    assert (checkpoint / "guest" / FILES[framework.__name__.rpartition("test_")[2]]).exists()
    assert not list(run.paths.work(1).iterdir()), "it was moved, not copied"
    assert not (run.paths.root / "pl").exists(), "no ModelCheckpoint of Lightning's beside ours"


def test_killed_without_a_word_it_goes_on_from_the_newest_checkpoint_bit_for_bit_alike(
    tmp_path: Path, framework: Any
) -> None:
    straight = framework.Life(Run(tmp_path / "straight").life(Daemon()))
    run, ended = Run(tmp_path / "killed", every_steps=4), Daemon()
    with pytest.raises(RuntimeError, match="killed"):
        framework.Life(run.life(Daemon()), framework.Killed())
    resumed = framework.Life(run.life(ended))
    assert ended.steps()[:2] == [4, 5]
    assert torch.equal(resumed.weights, straight.weights)


def test_a_save_that_somebody_asks_for_stops_nothing_and_the_run_says_how_often(
    tmp_path: Path, framework: Any
) -> None:
    run, daemon = Run(tmp_path / "run", every_steps=6), Daemon({3: save()})
    assert not framework.Life(run.life(daemon), max_steps=13).stopped
    names = [message.name for message in daemon.heard(RankSaved)]
    assert names == [f"step_{step:06d}" for step in (3, 6, 12, 13)]
    assert daemon.kinds()[-1] == "Finished"


def test_behind_its_last_step_no_further_one_is_trained(tmp_path: Path, framework: Any) -> None:
    """Left alone, transformers 5.10 trains one more: 7 steps are an epoch and two steps."""
    run, again = Run(tmp_path / "run"), Daemon()
    first = framework.Life(run.life(Daemon()), max_steps=7)
    second = framework.Life(run.life(again), max_steps=7)
    assert again.kinds() == ["Finished"]
    assert [message.step for message in again.heard(Finished)] == [7]
    assert torch.equal(first.weights, second.weights)


@pytest.mark.parametrize("last", [5, 7], ids=["of-an-epoch", "in-an-epoch"])
def test_asked_at_its_last_step_it_is_done_and_not_stopped(tmp_path: Path, framework: Any, last: int) -> None:
    daemon = Daemon({last: stop()})
    assert not framework.Life(Run(tmp_path / "run").life(daemon), max_steps=last).stopped
    assert daemon.kinds() == ["SaveStarted", "PartSaved", "RankSaved", "Finished"]
