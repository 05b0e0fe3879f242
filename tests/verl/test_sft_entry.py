"""How a run of verl's SFT trainer is judged: by the step it reached, since verl ends with 0 in any case."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import ROOT
from verl_slurm.config.load import load
from verl_slurm.errors import ConfigError, VerlSlurmError
from verl_slurm.guest.session import Session
from verl_slurm.paths import RunPaths
from verl_slurm.verl.overrides import check_overrides
from verl_slurm.verl.sft import _compose, _last_words, sft_settings
from verl_slurm.wire.messages import Finished, SaveRequest, Stopped


class _Line:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)

    def request(self) -> None:
        return None


def ended(step: int, *, saved: int, began: int = 0, stopping: SaveRequest | None = None) -> list[Any]:
    line = _Line()
    session = Session(line, rank=1, world_size=2, paths=RunPaths("/runs/one"))
    trainer = SimpleNamespace(step=step, total=16, is_done=step >= 16)
    saver: Any = SimpleNamespace(saved_step=saved, stopping=stopping, leave=lambda: session.stopped(3))
    _last_words(session, trainer, saver, began)
    return line.heard


def test_the_last_step_done_and_committed_is_the_end() -> None:
    assert ended(16, saved=16) == [Finished(rank=1, step=16)]


def test_a_request_in_the_last_step_changes_nothing_about_that() -> None:
    assert ended(16, saved=16, stopping=SaveRequest(request_id=3, stop=True)) == [Finished(rank=1, step=16)]


def test_it_leaves_as_asked() -> None:
    assert ended(7, saved=7, stopping=SaveRequest(request_id=3, stop=True)) == [Stopped(rank=1, request_id=3)]


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


def test_where_verl_saves_and_what_it_resumes_from_is_ours_to_say() -> None:
    fresh = sft_settings(save_dir=Path("/r/work"), resume=None, nodes=2, ranks_per_node=4, name="r")
    assert fresh["trainer.resume_mode"] == "disable", "auto would look into directories that nobody verified"
    assert fresh["trainer.resume_from_path"] is None
    path = Path("/r/checkpoints/step_000006/global_step_6")
    again = sft_settings(save_dir=Path("/r/work"), resume=path, nodes=2, ranks_per_node=4, name="r")
    assert (again["trainer.resume_mode"], again["trainer.resume_from_path"]) == ("resume_path", str(path))
    assert again["trainer.default_local_dir"] == "/r/work"
    assert again["trainer.max_ckpt_to_keep"] is None


def test_the_configuration_that_is_shipped_says_only_what_verl_may_be_told() -> None:
    config = load(ROOT / "configs/verl_sft.yaml")
    assert (config.trainer.backend, config.trainer.entry) == ("verl", "sft")
    words = [override.word for override in check_overrides(config.verl)]
    assert "engine.strategy=fsdp2" in words
    assert "optim.lr=1e-05" in words


@pytest.mark.verl
def test_verl_knows_every_word_of_it(tmp_path: Path) -> None:
    pytest.importorskip("hydra", reason="hydra comes with verl: make verl")
    config = load(ROOT / "configs/verl_sft.yaml")
    words = [override.word for override in check_overrides(config.verl)]
    ours = sft_settings(save_dir=tmp_path, resume=None, nodes=2, ranks_per_node=8, name="a")
    settings = _compose(words, ours)
    assert settings.trainer.default_local_dir == str(tmp_path)
    assert settings.optim.lr == 1e-5
    with pytest.raises(ConfigError, match=r"does not take these settings.*\+KEY adds"):
        _compose(["trainer.no_such_key=1"], ours)
