"""A configuration whose training loop is a guest's: what it says, and what it may not say."""

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.load import differences, dump, load, parse_config
from verl_slurm.verl.overrides import user_settings

_VERL = b"trainer: {backend: verl}\nverl:\n  trainer: {total_epochs: 2, save_freq: 5}\n"


def test_verls_own_keys_are_dotted_and_those_behind_the_dashes_win() -> None:
    words = ["trainer.save_freq=9", "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"]
    config = parse_config(_VERL, "x.yaml", ["verl.data.shuffle=false"], words)
    assert config.verl == {
        "trainer.total_epochs": 2,
        "data.shuffle": False,
        "trainer.save_freq": 9,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    }


def test_a_key_added_in_a_nested_section_is_added_to_verls_configuration() -> None:
    text = b"trainer: {backend: verl}\nverl: {actor: {'+model.x': 1, y: [1, 2], z: {}}}\n"
    assert parse_config(text, "x.yaml").verl == {"+actor.model.x": 1, "actor.y": [1, 2], "actor.z": {}}


def test_it_is_written_down_and_read_back_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = parse_config(_VERL, "x.yaml", [], ["+ray_kwargs.ray_init.num_gpus=2", "data.files='[a,b]'"])
    path = tmp_path / "run.yaml"
    path.write_bytes(dump(config))
    assert load(path) == config
    assert differences(config, load(path, ["verl.trainer.save_freq=7"])) == [("verl.trainer.save_freq", 5, 7)]


@pytest.mark.parametrize("word", ["trainer.save_freq", "~trainer.logger", "--help", "=3", "a b=3"])
def test_what_is_no_word_for_verl_is_refused(word: str) -> None:
    config = parse_config(_VERL, "x.yaml", [], [word, "trainer.resume_mode=auto"])
    with pytest.raises(ConfigError, match="not a word for verl") as caught:
        user_settings(config.verl)
    assert "checkpoint.resume_from" in caught.value.lines()[1], "and what else is wrong"


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--config-name=ppo_megatron_trainer.yaml"], "model_engine=megatron"),
        (["--config-name", "ppo_megatron_trainer"], "model_engine=megatron"),
        (["-cn", "sft_trainer"], "trainer.entry=sft"),
        (["--config-name=mine"], "[-m, MODULE, --config-name, NAME]"),
        (["--config-path=/x"], "[-m, MODULE, --config-name, NAME]"),
    ],
)
def test_hydras_option_for_a_file_names_what_takes_its_place(words: list[str], instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        user_settings(parse_config(_VERL, "x.yaml", [], words).verl)
    (line,) = caught.value.lines()
    assert instead in line
