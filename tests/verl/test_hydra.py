"""Hydra itself reads back what `verl.overrides` writes."""

from pathlib import PurePath

import pytest

pytest.importorskip("hydra", reason="hydra comes with verl: make verl")

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.harness import ROOT
from verl_slurm.config.load import load
from verl_slurm.verl.overrides import OwnSettings, check_overrides, hydra_words

pytestmark = pytest.mark.verl

VALUES = [
    None,
    True,
    False,
    0,
    -3,
    1e-6,
    2.5,
    "",
    "null",
    "1e-6",
    "010",
    "a b",
    "a,b",
    "x=y",
    "it's",
    'say "hi"',
    "ends\\",
    "a\\'b",
    "\\\\server\\share\\",
    "[1,2]",
    "{a:b}",
    "(x)",
    "/data/train.parquet",
    "org/model-7B",
    "a:b",
    "  padded ",
    "~x",
    "+x",
    "ünïcode",
    [],
    {},
    [1, "x y", None, [True]],
    {"k": {"j": "it's"}},
    ["a\\", "b"],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_hydra_reads_back_what_was_said(value: object) -> None:
    (override,) = check_overrides({"+group.key": [value]})
    parsed = OverridesParser.create().parse_override(override.word)
    assert parsed.is_add()
    assert parsed.key_or_group == "group.key"
    assert parsed.value() == [value] or _plain(parsed.value()) == [value]


def test_verl_knows_every_word_of_the_configuration_that_ships() -> None:
    """All of them, and those that a start adds: a key that verl does not have is an error of Hydra's."""
    config = load(ROOT / "configs/verl_grpo.yaml")
    own = OwnSettings(
        nodes=2,
        ranks_per_node=8,
        save_dir=PurePath("/run/work/epoch_000001"),
        resume=PurePath("/run/checkpoints/step_000007/global_step_7"),
        every_steps=10,
        name="a",
    )
    words = hydra_words(config.verl, (), own)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        settings = hydra.compose("ppo_trainer", overrides=[w for w in words if not w.startswith("hydra.")])
    assert settings.trainer.nnodes == 2
    assert settings.trainer.resume_from_path == "/run/checkpoints/step_000007/global_step_7"
    assert settings.actor_rollout_ref.actor.optim.lr == 1e-6


def _plain(value: object) -> object:
    """Hydra keeps text that was quoted as an object of its own."""
    if hasattr(value, "text"):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    return value
