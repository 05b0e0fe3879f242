"""What a start of verl's SFT trainer is told: where to save, what to resume from."""

from pathlib import Path

import pytest

from tests.harness import ROOT
from verl_slurm.base.errors import ConfigError
from verl_slurm.config.load import load
from verl_slurm.loops.verl_sft import _compose, sft_settings
from verl_slurm.verl.overrides import check_overrides


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
