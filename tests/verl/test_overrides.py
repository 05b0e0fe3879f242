"""verl's settings as words: quoted right, each key once, and what is not verl's to say refused."""

import time
from pathlib import PurePath
from typing import Any

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.verl.overrides import OwnSettings, check_overrides, hydra_words, override_value

OWN = OwnSettings(
    nodes=2,
    ranks_per_node=4,
    save_dir=PurePath("/r/work/epoch_000003"),
    resume=None,
    every_steps=10,
    name="run",
)


def words(section: dict[str, Any], *behind: str) -> list[str]:
    return [override.word for override in check_overrides(section, behind)]


def test_a_nested_section_and_a_dotted_one_are_the_same_words() -> None:
    nested = {"trainer": {"total_epochs": 3}, "data": {"train_files": ["/d/a.parquet"]}}
    dotted = {"trainer.total_epochs": 3, "data.train_files": ["/d/a.parquet"]}
    assert words(nested) == words(dotted) == ["trainer.total_epochs=3", "data.train_files=['/d/a.parquet']"]


def test_a_prefix_stands_before_the_whole_key_wherever_it_was_written() -> None:
    section = {"a": {"+new": 1, "~old": None}, "+b": {"c": {"d": "x"}}, "++e.f": True}
    assert words(section) == ["+a.new=1", "~a.old", "+b.c.d=x", "++e.f=true"]


def test_what_comes_later_counts_and_each_key_comes_once() -> None:
    assert words({"a": 1, "b": 2}, "c=3", "a=4") == ["b=2", "c=3", "a=4"]
    assert words({"a": 1}, "++a=2") == ["++a=2"]


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-06"),
        (0, "0"),
        ("", "''"),
        ("1e-6", "'1e-6'"),
        ("null", "'null'"),
        ("True", "'True'"),
        ("model/dir-1.0", "model/dir-1.0"),
        ("/abs", "'/abs'"),
        ("a=b,c", "'a=b,c'"),
        ("it's", "'it\\'s'"),
        ("ends\\", "'ends\\\\'"),
        ("in\\side", "'in\\side'"),
        ("a\\'b", "'a\\\\\\'b'"),
        ({}, "{}"),
        ([1, "x y", {"k": None}], "[1,'x y',{k:null}]"),
    ],
)
def test_a_value_is_quoted_by_hydras_grammar(value: object, word: str) -> None:
    assert words({"k": value}) == [f"k={word}"]


@pytest.mark.parametrize("bad", ["a b=1", "=1", "a", "a=1\nb=2", "a..b=1", "-x=1", "a=\0"])
def test_what_hydra_would_not_read_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="no setting that verl can read"):
        words({}, bad)


def test_a_long_run_of_backslashes_is_quoted_at_once() -> None:
    began = time.process_time()
    (override,) = check_overrides({"a": "\\" * 30_000 + "x"})
    assert override.value == "'" + "\\" * 30_000 + "x'"
    assert time.process_time() - began < 0.5


def test_a_line_break_in_a_value_is_refused_as_is_a_key_that_is_none() -> None:
    for section in ({"a": "x\ny"}, {"a b": 1}, {"a": {"b c": [1]}}, {"k": [{"x y": 1}]}, {"+++a": 1}):
        with pytest.raises(ConfigError, match="no setting that verl can read"):
            words(section)


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
        ("trainer.checkpoint_callback_class", "commits"),
    ],
)
def test_a_key_that_is_said_elsewhere_is_refused_with_the_key_that_is_meant(key: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        words({}, f"{key}=x")
    with pytest.raises(ConfigError, match=instead):
        words({key: "x"})


def test_the_environment_of_verls_workers_may_be_said() -> None:
    key = "+ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG"
    assert words({key: "INFO"}) == [f"{key}=INFO"]


@pytest.mark.parametrize(
    "word",
    [
        "trainer.v1.trainer_mode=separate_async",
        "trainer.use_v1=False",
        "trainer.save_freq=-1",
        "trainer.save_freq=0",
        "trainer.del_local_ckpt_after_load=True",
        "actor_rollout_ref.actor.checkpoint.async_save=True",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
        "trainer.val_only=True",
        "trainer={del_local_ckpt_after_load:true}",
        "+ray_kwargs={ray_init:{num_cpus:1}}",
        "~trainer",
        "actor_rollout_ref.actor.checkpoint={save_contents:[model]}",
        "actor_rollout_ref.actor={checkpoint:{async_save:true}}",
    ],
)
def test_what_verl_cannot_do_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="verl cannot be run so here"):
        words({}, word)


@pytest.mark.parametrize(
    "word",
    [
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.use_v1=True",
        "trainer.save_freq=5",
        "critic.checkpoint.async_save=False",
        "actor_rollout_ref.rollout.engine_kwargs={vllm:{seed:1}}",
        "actor_rollout_ref.actor.checkpoint.save_contents=['model','optimizer','extra','hf_model']",
    ],
)
def test_what_verl_can_do_passes(word: str) -> None:
    assert words({}, word) == [word]


def test_a_start_adds_where_to_save_and_nothing_to_resume_from() -> None:
    got = hydra_words({"trainer": {"total_epochs": 2}}, [], OWN)
    assert got[0] == "trainer.total_epochs=2"
    for expected in (
        "trainer.default_local_dir='/r/work/epoch_000003'",
        "trainer.resume_mode=disable",
        "trainer.resume_from_path=null",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=4",
        "trainer.save_freq=10",
        "trainer.v1.trainer_mode=verl_slurm_sync",
    ):
        assert expected in got


def test_a_resume_names_the_verified_checkpoint_and_the_users_mode_and_cadence_stay() -> None:
    import msgspec

    own = msgspec.structs.replace(OWN, resume=PurePath("/r/checkpoints/step_000007/global_step_7"))
    got = hydra_words({"trainer.v1.trainer_mode": "colocate_async"}, ["trainer.save_freq=3"], own)
    assert "trainer.resume_from_path='/r/checkpoints/step_000007/global_step_7'" in got
    assert "trainer.v1.trainer_mode=verl_slurm_colocate_async" in got
    assert [word for word in got if word.startswith("trainer.save_freq")] == ["trainer.save_freq=3"]
    assert len({word.partition("=")[0] for word in got}) == len(got)


def test_the_last_word_for_a_key_can_be_asked_for() -> None:
    assert override_value({"a": {"b": "x y"}}, [], "a.b") == "x y"
    assert override_value({"a.b": 1}, ["+a.b=2"], "a.b") == "2"
    assert override_value({}, [], "a.b") is None
