from pathlib import Path

import pytest

from verl_slurm.config.load import parse_config
from verl_slurm.verl.overrides import user_settings
from verl_slurm.verl.releases import Entry
from verl_slurm.verl.verl_inputs import (
    Input,
    bytes_per_parameter,
    data_of,
    inputs_of,
    is_remote,
    said_settings,
    with_critic,
)


def found(entry: Entry, **words: object) -> list[Input]:
    said = user_settings({name.replace("__", "."): value for name, value in words.items()})
    return inputs_of(entry, said_settings(said), said)


def places(entry: Entry, **words: object) -> dict[str, list[str]]:
    by_key: dict[str, list[str]] = {}
    for one in found(entry, **words):
        by_key.setdefault(one.key, []).append(one.place)
    return by_key


def test_files_are_one_or_a_list() -> None:
    assert places("sft", data__train_files=["/a", "/b"])["data.train_files"] == ["/a", "/b"]
    assert places("sft", data__train_files="/a")["data.train_files"] == ["/a"]
    assert places("ppo", data__val_files=None) == {}


def test_what_the_user_did_not_say_is_known_as_verls_own_default() -> None:
    settings = {"data": {"train_files": "~/a"}, "model": {"path": "/m"}}
    (data, model) = inputs_of("sft", settings, user_settings({"model.path": "/m"}))
    assert (data.is_default, model.is_default) == (True, False)


@pytest.mark.parametrize("prefix", ["+", "++"])
def test_hydras_prefixes_do_not_hide_a_word(prefix: str) -> None:
    said = user_settings({f"{prefix}model.path": "/m"})
    assert inputs_of("sft", said_settings(said), said)[-1].place == "/m"


def test_what_refers_to_the_environment_is_left_to_verl() -> None:
    assert "model.path" not in places("sft", model__path="${oc.env:MODEL}/x")


def test_a_critic_is_there_as_verl_decides_it_and_its_model_is_read_too() -> None:
    assert with_critic("ppo", {})
    assert not with_critic("ppo", {"algorithm": {"adv_estimator": "grpo"}})
    assert with_critic("ppo", {"algorithm": {"adv_estimator": "grpo"}, "critic": {"enable": True}})
    assert not with_critic("sft", {})
    assert places("ppo", critic__model__path="/c")["critic.model.path"] == ["/c"]
    assert "critic.model.path" not in places("ppo", critic__model__path="/c", algorithm__adv_estimator="grpo")


def test_a_save_holds_float32_weights_and_two_moments_of_each_model_that_trains() -> None:
    assert bytes_per_parameter("sft", {}) == 12
    assert bytes_per_parameter("ppo", {"algorithm": {"adv_estimator": "grpo"}}) == 12
    assert bytes_per_parameter("ppo", {}) == 24
    assert bytes_per_parameter("sft", {"model": {"lora_rank": 8}}) == 4
    contents = {"checkpoint": {"save_contents": ["model", "optimizer", "extra", "hf_model"]}}
    assert bytes_per_parameter("sft", contents) == 14


def test_what_is_remote() -> None:
    assert is_remote("hdfs://a/b")
    assert not is_remote("/a:b/c")


def test_the_files_of_a_run_are_its_data_as_far_as_they_are_files() -> None:
    text = (
        b"trainer: {backend: verl}\nverl:\n  data.train_files: [/b, hdfs://c, /a, '${oc.env:X}']\n"
        b"  data: {val_files: ~/v}\n"
    )
    assert data_of(parse_config(text, "x.yaml")) == ("/a", "/b", str(Path("~/v").expanduser()))
    assert data_of(parse_config(b"trainer: {backend: verl}", "x.yaml")) is None
    assert data_of(parse_config(text + b"data: {root: /d}\n", "x.yaml")) == Path("/d")
