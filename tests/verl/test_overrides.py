"""verl's settings by key: what a user may say, what is not verl's to say, what they name, and for which verl."""

from pathlib import Path, PurePath
from typing import Any

import msgspec
import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.load import flattened, parse_config
from verl_slurm.verl.overrides import (
    OwnSettings,
    own_settings,
    require_possible,
    switches_as_text,
    trainer_mode,
    user_settings,
)
from verl_slurm.verl.releases import RELEASES, Entry, require_usable
from verl_slurm.verl.verl_inputs import (
    Input,
    bytes_per_parameter,
    data_of,
    inputs_of,
    is_remote,
    said_settings,
    with_critic,
)

OWN = OwnSettings(
    nodes=2,
    ranks_per_node=4,
    save_dir=PurePath("/r/work/attempt_000003"),
    resume=None,
    every_steps=10,
    name="run",
)


def names(section: dict[str, Any]) -> dict[str, Any]:
    return {setting.name: setting.value for setting in user_settings(flattened(section)).values()}


def ours(entry: Any, section: dict[str, Any], own: OwnSettings = OWN) -> dict[str, Any]:
    return {setting.name: setting.value for setting in own_settings(entry, own, user_settings(section))}


def judge(section: dict[str, Any]) -> None:
    """As where there is no verl to compose it."""
    said = user_settings(flattened(section))
    require_possible(said_settings(said), said)


def test_a_nested_section_and_a_dotted_one_are_the_same_settings() -> None:
    nested = {"trainer": {"total_epochs": 3}, "data": {"train_files": ["/d/a.parquet"]}}
    dotted = {"trainer.total_epochs": 3, "data.train_files": ["/d/a.parquet"]}
    assert names(nested) == names(dotted) == dotted


def test_a_prefix_stands_before_the_whole_key_wherever_it_was_written() -> None:
    section = {"a": {"+new": 1, "~old": None, "++both": 2}, "+b": {"c": {"d": "x"}}, "++e.f": True}
    assert list(names(section)) == ["+a.new", "~a.old", "++a.both", "+b.c.d", "++e.f"]


def test_what_comes_later_counts_and_each_key_comes_once() -> None:
    assert names({"a": 1, "b": 2, "++a": 4}) == {"b": 2, "++a": 4}


@pytest.mark.parametrize("bad", ["a b", "", "a..b", "-x", "a=1,b", "a:b", "a@", "+++a", "+"])
def test_what_is_no_key_of_hydras_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="no setting that verl can read"):
        user_settings({bad: 1})


@pytest.mark.parametrize(
    "value",
    ["x\ny", "\0", "x" * 40_000, "\\" * 30_000, ["a", "b\x1b"], [{"a": "\n"}], ["ab"] * 30_000, object()],
)
def test_a_value_that_no_command_line_holds_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="no setting that verl can read"):
        user_settings({"a": value})


@pytest.mark.parametrize("value", ["False", "True", "None", ["TRUE"], "null"])
def test_text_that_somebody_takes_for_a_switch_is_refused(value: object) -> None:
    """To verl any text is true, `False` as well: what its own examples say would do the contrary."""
    said = user_settings({"actor_rollout_ref.actor.use_kl_loss": value})
    (refusal,) = switches_as_text(said)
    assert "in small letters and without quotes" in refusal.one_line()
    assert switches_as_text(user_settings({"a": "Falsehood", "b": False, "c": ["x", 1]})) == []


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("trainer.default_local_dir", "run_dir"),
        ("trainer.resume_mode", "checkpoint.resume_from"),
        ("++trainer.resume_from_path", "checkpoint.resume_from"),
        ("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last"),
        ("trainer.nnodes", "distributed.nodes"),
        ("trainer.n_gpus_per_node", "distributed.dp_size"),
        ("+ray_kwargs.ray_init.num_gpus", "slurm.gpus_per_node"),
        ("hydra.run.dir", "run_dir"),
        ("hydra.mode", "one run for each setting"),
        ("hydra.searchpath", "only verbose"),
        ("hydra.job.chdir", "only verbose"),
        ("hydra/launcher", "only verbose"),
        ("+hydra.callbacks.x._target_", "only verbose"),
        ("+model@hydra.run", "run_dir"),
        ("+optim@ray_kwargs.ray_init", "slurm.gpus_per_node"),
        ("trainer.checkpoint_callback_class", "commits"),
    ],
)
def test_a_key_that_is_said_elsewhere_is_refused_with_the_key_that_is_meant(key: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        user_settings({key: "x"})


def test_hydras_logging_and_the_environment_of_verls_workers_may_be_said() -> None:
    section = {
        "+ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG": "INFO",
        "hydra.verbose": True,
        "hydra/job_logging": "disabled",
    }
    assert names(section) == section


@pytest.mark.parametrize(
    "section",
    [
        {"trainer": "${mine}"},
        {"trainer.v1": "${mine}"},
        {"+ray_kwargs": "${mine}"},
        {"+optim@trainer": "fsdp"},
        {"+optim@trainer.v1": "fsdp"},
        {"~trainer": None},
        {"~actor_rollout_ref.actor.checkpoint": None},
        {"hydra": "x"},
    ],
)
def test_a_section_that_holds_keys_of_ours_is_not_said_as_a_whole(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        user_settings(section)


@pytest.mark.parametrize(
    "section",
    [
        {"trainer.v1.trainer_mode": "separate_async"},
        {"trainer.use_v1": False},
        {"trainer.save_freq": -1},
        {"trainer.save_freq": 0},
        {"trainer.save_freq": "${x}"},
        {"trainer.del_local_ckpt_after_load": True},
        {"actor_rollout_ref.actor.checkpoint.async_save": True},
        {"actor_rollout_ref.actor.checkpoint.save_contents": ["model"]},
        {"actor_rollout_ref.actor.checkpoint.load_contents": "model"},
        {"checkpoint.save_contents": []},
        {"trainer.val_only": True},
        {"+a": {"checkpoint": {"async_save": True}}, "actor_rollout_ref.actor": "${a}"},
    ],
)
def test_what_verl_cannot_do_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="verl cannot be run so here"):
        judge(section)


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"trainer.v1.trainer_mode": "colocate_async"},
        {"trainer.use_v1": True},
        {"trainer.save_freq": 5},
        {"critic.checkpoint.async_save": False},
        {"actor_rollout_ref.rollout.engine_kwargs": {"vllm": {"seed": 1}}},
        {"actor_rollout_ref.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"]},
    ],
)
def test_what_verl_can_do_passes(section: dict[str, Any]) -> None:
    judge(section)
    require_possible({"trainer": {"save_freq": -1}}, {})  # verl's own default is replaced, and not judged


def test_a_start_says_where_to_save_and_nothing_to_resume_from() -> None:
    got = ours("ppo", {"trainer.total_epochs": 2})
    assert got["trainer.default_local_dir"] == "/r/work/attempt_000003"
    assert (got["trainer.resume_mode"], got["trainer.resume_from_path"]) == ("disable", None)
    assert (got["trainer.nnodes"], got["trainer.n_gpus_per_node"]) == (2, 4)
    assert (got["trainer.save_freq"], got["trainer.experiment_name"]) == (10, "run")
    assert got["hydra.run.dir"] == "/r/work/hydra"
    # verl never removes a checkpoint itself.
    assert got["trainer.max_actor_ckpt_to_keep"] is ours("sft", {})["trainer.max_ckpt_to_keep"] is None
    assert trainer_mode({}) == "sync"
    # Its responses are kept unless the user has a manager of their own.
    key = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    assert got[f"++{key}"] == "verl_slurm.loops.verl.verl_rollouts.LedgerManager"
    assert f"++{key}" not in ours("ppo", {f"+{key}": "mine.Manager"}) | ours("sft", {})


@pytest.mark.parametrize("entry", ["ppo", "sft"])
def test_a_resume_names_the_verified_checkpoint_and_the_users_cadence_and_name_stay(entry: str) -> None:
    own = msgspec.structs.replace(OWN, resume=PurePath("/r/checkpoints/step_000007/global_step_7"))
    got = ours(entry, {"trainer.save_freq": 3, "trainer.experiment_name": "mine"}, own)
    assert got["trainer.resume_mode"] == "resume_path", (
        "auto would look into directories that nobody verified"
    )
    assert got["trainer.resume_from_path"] == "/r/checkpoints/step_000007/global_step_7"
    assert not {"trainer.save_freq", "trainer.experiment_name"} & set(got)


def test_a_resumed_start_does_not_validate_again_unless_the_user_says_so_by_name() -> None:
    own = msgspec.structs.replace(OWN, resume=PurePath("/r/checkpoints/step_000007/global_step_7"))
    key = "trainer.val_before_train"
    assert ours("ppo", {}, own)[f"++{key}"] is False
    assert not {name for name in ours("ppo", {key: True}, own) if name.endswith(key)}
    # The first start does as verl has it, and verl's SFT never validates before.
    assert not {name for name in ours("ppo", {}) | ours("sft", {}, own) if name.endswith(key)}


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


@pytest.mark.parametrize("version", RELEASES)
def test_of_a_release_that_was_run_nothing_has_to_be_known(version: str) -> None:
    assert require_usable(version) == ""


@pytest.mark.parametrize("version", ["0.9.2", "1.0.0.dev1", "0.10", "main"])
def test_one_that_nobody_ran_is_named_and_so_are_those_that_were(version: str) -> None:
    note = require_usable(version)
    assert version in note
    assert "0.9.1" in note
    assert "\n" not in note


@pytest.mark.parametrize("version", ["0.8.0", "0.7.1", "0.2.0.post2", "0.1"])
def test_one_without_what_we_hold_on_to_is_refused_with_the_one_to_install(version: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be run.*found 0.*pip install verl==0\.9\.1"):
        require_usable(version)
