"""verl's settings by key: what a user may say, each key once, and what is not verl's to say refused."""

from pathlib import PurePath
from typing import Any

import msgspec
import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.load import flattened
from verl_slurm.verl.overrides import (
    OwnSettings,
    own_settings,
    require_possible,
    switches_as_text,
    trainer_mode,
    user_settings,
)
from verl_slurm.verl.verl_inputs import said_settings

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


def test_verls_own_default_for_saving_is_replaced_and_not_judged() -> None:
    require_possible({"trainer": {"save_freq": -1}}, {})


def test_a_start_says_where_to_save_and_nothing_to_resume_from() -> None:
    got = ours("ppo", {"trainer.total_epochs": 2})
    assert got["trainer.default_local_dir"] == "/r/work/attempt_000003"
    assert (got["trainer.resume_mode"], got["trainer.resume_from_path"]) == ("disable", None)
    assert (got["trainer.nnodes"], got["trainer.n_gpus_per_node"]) == (2, 4)
    assert (got["trainer.save_freq"], got["trainer.experiment_name"]) == (10, "run")
    assert got["hydra.run.dir"] == "/r/work/hydra"


@pytest.mark.parametrize("entry", ["ppo", "sft"])
def test_a_resume_names_the_verified_checkpoint_and_the_users_cadence_and_name_stay(entry: str) -> None:
    own = msgspec.structs.replace(OWN, resume=PurePath("/r/checkpoints/step_000007/global_step_7"))
    got = ours(entry, {"trainer.save_freq": 3, "trainer.experiment_name": "mine"}, own)
    assert got["trainer.resume_mode"] == "resume_path", (
        "auto would look into directories that nobody verified"
    )
    assert got["trainer.resume_from_path"] == "/r/checkpoints/step_000007/global_step_7"
    assert not {"trainer.save_freq", "trainer.experiment_name"} & set(got)


def test_verl_never_removes_a_checkpoint_itself() -> None:
    assert ours("sft", {})["trainer.max_ckpt_to_keep"] is None
    assert ours("ppo", {})["trainer.max_actor_ckpt_to_keep"] is None


def test_the_mode_is_verls_default_unless_it_is_said() -> None:
    assert trainer_mode({}) == "sync"
    assert trainer_mode({"trainer": {"v1": {"trainer_mode": "colocate_async"}}}) == "colocate_async"


def test_verls_responses_are_kept_unless_the_user_has_a_manager_of_their_own() -> None:
    key = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    assert ours("ppo", {})[f"++{key}"] == "verl_slurm.loops.verl_rollouts.LedgerManager"
    assert f"++{key}" not in ours("ppo", {f"+{key}": "mine.Manager"})
    assert f"++{key}" not in ours("sft", {})
