import pytest

from verl_slurm.verl.inputs import bytes_per_parameter, inputs_of, is_remote, with_critic


def places(entry: str, **words: object) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in inputs_of(entry, {name.replace("__", "."): value for name, value in words.items()}):
        found.setdefault(one.key, []).append(one.place)
    return found


@pytest.mark.parametrize("said", [["/a", "/b"], "[/a,/b]", "['/a', \"/b\"]"])
def test_files_are_one_or_a_list_or_a_list_as_hydra_writes_it(said: object) -> None:
    assert places("sft", data__train_files=said)["data.train_files"] == ["/a", "/b"]
    assert places("sft", data__train_files="/a")["data.train_files"] == ["/a"]


def test_what_nobody_said_is_verls_own_default_and_known_as_such() -> None:
    found = {one.key: one for one in inputs_of("ppo", {})}
    assert found["data.val_files"].place == "~/data/rlhf/gsm8k/test.parquet"
    assert all(one.is_default for one in found.values())
    assert "data.val_files" not in places("sft")


@pytest.mark.parametrize("nothing", [None, "null", "None"])
def test_nothing_is_nothing(nothing: object) -> None:
    assert "data.val_files" not in places("ppo", data__val_files=nothing)


def test_hydras_prefixes_do_not_hide_a_word() -> None:
    assert inputs_of("sft", {"+model.path": "/m"})[-1].place == "/m"
    assert inputs_of("sft", {"++model.path": "/m"})[-1].is_default is False


def test_what_refers_to_something_else_is_left_to_verl() -> None:
    assert "model.path" not in places("sft", model__path="${oc.env:MODEL}/x")


def test_a_critic_is_there_as_verl_decides_it_and_its_model_is_read_too() -> None:
    assert with_critic("ppo", {})
    assert not with_critic("ppo", {"algorithm.adv_estimator": "grpo"})
    assert with_critic("ppo", {"algorithm.adv_estimator": "grpo", "critic.enable": True})
    assert not with_critic("sft", {})
    assert places("ppo", critic__model__path="/c")["critic.model.path"] == ["/c"]
    assert "critic.model.path" not in places("ppo", critic__model__path="/c", algorithm__adv_estimator="grpo")


def test_a_save_holds_float32_weights_and_two_moments_of_each_model_that_trains() -> None:
    assert bytes_per_parameter("sft", {}) == 12
    assert bytes_per_parameter("ppo", {"algorithm.adv_estimator": "grpo"}) == 12
    assert bytes_per_parameter("ppo", {}) == 24
    assert bytes_per_parameter("sft", {"model.lora_rank": 8}) == 4
    words = {"checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"]}
    assert bytes_per_parameter("sft", words) == 14


def test_what_is_remote() -> None:
    assert is_remote("hdfs://a/b")
    assert not is_remote("/a:b/c")
