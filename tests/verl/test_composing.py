"""Hydra itself writes, reads and composes verl's settings, over the configuration that verl ships."""

import subprocess
import sys
import time
from pathlib import PurePath
from typing import Any

import pytest

pytest.importorskip("hydra", reason="hydra comes with verl: make verl")

from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.harness import ROOT
from verl_slurm.base.errors import ConfigError
from verl_slurm.config.load import load, parse_config
from verl_slurm.verl.composing import checked_settings, unread_additions, words_of
from verl_slurm.verl.overrides import FORMER, OwnSettings, Setting, user_settings, value_at
from verl_slurm.verl.releases import Entry
from verl_slurm.verl.verl_inputs import inputs_of

pytestmark = pytest.mark.verl

OWN = OwnSettings(
    nodes=2,
    ranks_per_node=8,
    save_dir=PurePath("/run/work/attempt_000001"),
    resume=PurePath("/run/checkpoints/step_000007/global_step_7"),
    every_steps=10,
    name="a",
)

VALUES = [
    True,
    False,
    0,
    -3,
    1e-6,
    2.5,
    "",
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


@pytest.mark.parametrize("value", [None, *VALUES], ids=repr)
def test_hydra_reads_back_what_was_said(value: object) -> None:
    (word,) = words_of(user_settings({"+group.key": [value]}).values())
    parsed = OverridesParser.create().parse_override(word)
    assert parsed.is_add()
    assert (parsed.key_or_group, parsed.value()) == ("group.key", [value])


@pytest.mark.parametrize("value", [[{"x y z=": 1, "null": 2}], [{"1": 2}], [{"": 1}]])
def test_what_hydras_grammar_cannot_say_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        words_of([Setting("", "k", value)])


def composed(section: dict[str, Any], entry: Entry = "ppo") -> dict[str, Any]:
    return checked_settings(entry, section, OWN).settings


@pytest.mark.parametrize(("entry", "file"), [("ppo", "verl_grpo"), ("sft", "verl_sft")])
def test_verl_knows_every_word_of_the_configurations_that_ship(entry: Entry, file: str) -> None:
    settings = composed(load(ROOT / f"configs/{file}.yaml").verl, entry)
    assert value_at(settings, "trainer.nnodes") == 2
    assert value_at(settings, "trainer.resume_from_path") == "/run/checkpoints/step_000007/global_step_7"
    assert value_at(settings, "trainer.save_freq") in (5, 10, 20, 50, 100)


def test_the_words_of_a_start_end_with_our_trainers_name() -> None:
    words = checked_settings("ppo", {"trainer.v1.trainer_mode": "colocate_async"}, OWN).words
    assert words[-1] == "trainer.v1.trainer_mode=verl_slurm_colocate_async"
    assert "trainer.default_local_dir='/run/work/attempt_000001'" in words
    assert "hydra.run.dir='/run/work/hydra'" in words
    assert not any("checkpoint_callback_class" in word for word in words)


def test_all_words_that_verl_does_not_take_are_refused_at_once_each_with_its_remedy() -> None:
    section = {
        "trainer.nnodes": 2,
        "trainer.no_such_key": 1,
        "actor_rollout_ref.rollout.multi_turn.max_turns": 3,
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 4,
        "mine.x": 1,
        "actor_rollout_ref.model.override_config.x": 1,
        "trainer.save_freq": 5,
    }
    with pytest.raises(ConfigError) as caught:
        composed(section)
    lines = {line.partition(": ")[2].split(" ")[0].rstrip(";"): line for line in caught.value.lines()}
    remedies = {
        "trainer.nnodes": "distributed.nodes",
        "verl.trainer.no_such_key": "another release or trainer",
        "verl.actor_rollout_ref.rollout.multi_turn.max_turns": "multi_turn.max_assistant_turns",
        "verl.actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "add model_engine=megatron",
        "verl.mine.x": "+KEY",
        "verl.actor_rollout_ref.model.override_config.x": "+KEY",
    }
    assert lines.keys() == remedies.keys()
    for key, remedy in remedies.items():
        assert remedy in lines[key]
        assert "(expected )" not in lines[key]
        assert ("+KEY" in lines[key]) is (remedy == "+KEY"), "verl would take it, and nothing would read it"


def test_an_added_key_beside_verls_own_is_refused_by_its_former_name_or_said() -> None:
    said = user_settings(
        {"+model.partial_pretrain": "/m", "+model.mine": 1, "+model.override_config.x": 1, "+a.b": 1}
    )
    refused, notes = unread_additions("sft", said.values())
    assert [(error.where, error.expected) for error in refused] == [
        ("verl.model.partial_pretrain", "model.path")
    ]
    (note,) = notes
    assert note.startswith("not looked at: whether anything reads verl.+model.mine")


@pytest.mark.parametrize("entry", ["sft", "ppo"])
def test_what_takes_the_place_of_a_former_name_is_a_key_of_this_verl(entry: Entry) -> None:
    settings = composed({} if entry == "sft" else {"actor_rollout_ref.rollout.name": "vllm"}, entry)
    for former, now in FORMER[entry].items():
        key = now.partition(":")[0]
        above, _, last = key.rpartition(".")
        if not now.endswith("of the run's"):
            assert last in value_at(settings, above), former
        place = value_at(settings, former.rpartition(".")[0]) if "." in former else settings
        assert former.rpartition(".")[2] not in (place or {}), f"{former} is a key today"


def test_a_group_is_chosen_and_what_it_brings_is_seen() -> None:
    assert "megatron" in value_at(composed({"model_engine": "megatron"}), "actor_rollout_ref.actor")
    with pytest.raises(ConfigError, match="no_such_engine"):
        composed({"model_engine": "no_such_engine"})


def test_a_reference_is_followed_before_a_value_is_judged() -> None:
    data = {"+mine.files": ["/d/a", "/d/b"], "data.train_files": "${mine.files}"}
    said = user_settings(data)
    assert [one.place for one in inputs_of("ppo", composed(data), said)][:2] == ["/d/a", "/d/b"]
    for key, value in [
        ("trainer.use_v1", False),
        ("trainer.val_only", 1),
        ("trainer.v1.trainer_mode", "separate_async"),
        ("critic.checkpoint.save_contents", ["model"]),
    ]:
        with pytest.raises(ConfigError, match=rf"verl cannot be run so here: verl\.{key}"):
            composed({"+mine": value, key: "${mine}"})


def test_a_whole_section_by_reference_is_judged_by_what_it_has() -> None:
    section = {"+mine.async_save": True, "critic.checkpoint": "${mine}"}
    with pytest.raises(ConfigError, match=r"critic\.checkpoint\.async_save"):
        composed(section)


def test_the_environment_is_neither_asked_nor_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "hunter2")
    section = {"data.train_files": "${oc.env:SECRET_OF_MINE}", "data.val_files": "${data.train_files}"}
    settings = composed(section)
    assert "hunter2" not in repr(settings)
    assert inputs_of("ppo", settings, user_settings(section))[0].kind == "model"
    with pytest.raises(ConfigError) as caught:
        composed({"trainer.v1.trainer_mode": "${oc.env:SECRET_OF_MINE}"})
    assert "hunter2" not in caught.value.one_line()
    from omegaconf import OmegaConf

    assert OmegaConf.create({"a": "${oc.env:SECRET_OF_MINE}"}).a == "hunter2", (
        "verl may, in this process as well"
    )


def test_references_in_a_circle_stay_as_they_are_and_a_tower_of_them_is_refused() -> None:
    assert composed({"+a": "${b}", "+b": "${a}"})["a"] == "${b}"
    assert composed({"+a.b": "${a}"})["a"] == {"b": "${a}"}
    tower = {f"+x{n}": [f"${{x{n - 1}}}"] * 10 if n else ["x"] * 10 for n in range(12)}
    began = time.process_time()
    with pytest.raises(ConfigError, match="refer to themselves"):
        composed(tower)
    assert time.process_time() - began < 60


@pytest.mark.parametrize(
    ("first", "each"),
    [("x" * 1000, "${{{0}}}" * 10), (["x"] * 100, "${{oc.create:[" + ",".join(["${{{0}}}"] * 50) + "]}}")],
    ids=["text", "a resolver"],
)
def test_references_that_multiply_are_refused_by_their_name(first: object, each: str) -> None:
    section = {"+x0": first} | {f"+x{n}": each.format(f"x{n - 1}") for n in range(1, 5)}
    with pytest.raises(ConfigError, match=r"grow too large: verl\.x[1-4] .*more than 1 MiB of text"):
        composed(section)


def test_words_behind_the_dashes_are_hydras() -> None:
    words = ["trainer.val_only=False", "data.train_files=[/d/a,'/d/b']", "+x={a:1,b:${data.seed}}", "y=null"]
    section = parse_config(b"trainer: {backend: verl}", "x.yaml", [], words).verl
    assert section == {
        "trainer.val_only": False,
        "data.train_files": ["/d/a", "/d/b"],
        "+x.a": 1,
        "+x.b": "${data.seed}",
        "y": None,
    }
    for bad in ("a=1,2", "a=range(3)", "a=[", "a='", "~a=1"):
        with pytest.raises(ConfigError, match="not a word for verl"):
            user_settings(parse_config(b"trainer: {backend: verl}", "x.yaml", [], [bad]).verl)


def test_neither_verl_nor_torch_nor_ray_is_imported() -> None:
    probe = (
        "import sys; from pathlib import PurePath; from verl_slurm.verl.composing import *; "
        "from verl_slurm.verl.overrides import OwnSettings; "
        "checked_settings('sft', {}, OwnSettings(nodes=1, ranks_per_node=1, save_dir=PurePath('/r'), resume=None, "
        "every_steps=1, name='a')); print([m for m in ('verl', 'torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
