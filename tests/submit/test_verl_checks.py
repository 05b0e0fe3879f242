"""Whatever verl would crash on in the job is refused before it is queued, in one line with the way out."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from tests.builders import checkpoint_info, write_manifest, write_verl_rows
from tests.fakes.torch_divider import shard_step
from tests.verl.uncomposed import without_hydra
from verl_slurm.base.errors import ConfigError, DataError, VerlSlurmError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.checks import told
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import ContainerConfig, RunConfig
from verl_slurm.submit.checks import verl as verl_checks
from verl_slurm.submit.checks.run_directory import checkpoint_size
from verl_slurm.submit.checks.verl import check_ranks, check_verl
from verl_slurm.submit.relative_paths import absolute
from verl_slurm.verl.releases import installed_verl

pytest.importorskip("pyarrow")

REWARDS = """
def default_compute_score(data_source, solution_str, ground_truth, **kwargs):
    if data_source == "openai/gsm8k":
        return 1.0
    elif data_source in ["math", "sums"] or data_source.startswith("aime"):
        return 2.0
    else:
        raise NotImplementedError(data_source)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(verl_checks, "_BESIDES", {"sft": {}, "ppo": {}})
    without_hydra(monkeypatch)
    verl_says(monkeypatch, '["", ""]')
    write_verl_rows(tmp_path / "train.parquet")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    header = b'{"w": {"dtype": "F32", "shape": [1000, 10], "data_offsets": [0, 40000]}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(40000))
    return tmp_path


def verl_says(monkeypatch: pytest.MonkeyPatch, answer: str, unseen: str = "") -> None:
    """The real judgement: `tests/verl/test_first_config.py`."""
    monkeypatch.setattr(verl_checks, "answer_of_ranks_python", lambda *_: (answer, unseen))


def config(place: Path, *overrides: str, entry: str = "sft") -> RunConfig:
    text = (
        f"run_dir: {place}/run\ntrainer: {{backend: verl, entry: {entry}}}\ndistributed: {{dp_size: 2}}\n"
        f"verl:\n  data.train_files: {place}/train.parquet\n  data.val_files: null\n"
        f"  model.path: {place}/model\n  actor_rollout_ref.model.path: {place}/model\n"
    )
    return parse_config(text.encode(), "x.yaml", list(overrides))


def check(given: RunConfig, *committed: CheckpointInfo, version: str | None = "0.9.1") -> Any:
    with mock.patch.object(verl_checks, "installed_verl", return_value=version):
        return told(check_verl(given, RunPaths(given.run_dir), committed)[0])


def saved(step: int, ranks: int) -> CheckpointInfo:
    return checkpoint_info(step, world_size=ranks)


def test_a_run_that_is_as_it_should_be_is_said_to_be(place: Path) -> None:
    checked, notes = check(config(place), saved(6, 2))
    assert "verl 0.9.1 is installed" in checked
    assert "2 ranks, as saved" in checked
    assert notes == []


def checkpoint(directory: Path, ranks: int, *files: str) -> Path:
    """step_000006 with a manifest that names these files of verl's, which are there."""
    place = directory / "step_000006"
    for name in files:
        path = place / "global_step_6" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    entries = tuple(FileEntry(path=f"global_step_6/{name}", size=1, sha256="0" * 64) for name in files)
    write_manifest(place, 6, world_size=ranks, guest="verl", files=entries)
    return place


def shards(role: str, ranks: int) -> list[str]:
    kinds = ("model", "optim", "extra_state")
    return [f"{role}{kind}_world_size_{ranks}_rank_{n}.pt" for kind in kinds for n in range(ranks)]


@pytest.mark.parametrize(("entry", "role"), [("sft", ""), ("ppo", "actor/")])
def test_shards_that_are_not_understood_name_both_numbers_and_verls_own_merger(
    place: Path, entry: str, role: str
) -> None:
    data = ["data_0.pt", "data_1.pt"] if entry == "sft" else ["data.pt"]
    checkpoint(place / "run/checkpoints", 2, *shards(role, 2), f"{role}fsdp_config.json", *data)
    given = config(place, "distributed.dp_size=4", entry=entry)
    with pytest.raises(ConfigError) as caught:
        check(given, saved(6, 2), saved(4, 4))
    line = caught.value.one_line()
    folder = f"{place}/run/checkpoints/step_000006/global_step_6/{role}".rstrip("/")
    for word in (
        "world size 4, and step_000006 was saved with 2: ",
        "distributed.dp_size=2",
        f"python -m verl.model_merger merge --backend fsdp --local_dir {folder} ",
        "--target_dir MODEL_DIR",
        "optimizer",
    ):
        assert word in line
    assert "\n" not in line


def test_megatrons_checkpoints_keep_their_number_of_ranks(place: Path) -> None:
    checkpoint(place / "run/checkpoints", 2, "actor/dist_ckpt/__0_0.distcp", "data.pt")
    with pytest.raises(ConfigError, match=r"Megatron.*dp_size=2.*merge --backend megatron --local_dir"):
        check(config(place, "distributed.dp_size=4", entry="ppo"), saved(6, 2))
    # The one that counts is the one that is resumed from.
    paths = RunPaths(place / "run")
    both = (saved(6, 4), saved(4, 2))
    checkpoint(place / "run/checkpoints", 4, "actor/dist_ckpt/__0_0.distcp")
    assert check_ranks(config(place, "checkpoint.resume_from=step_000004"), paths, both) == ""
    assert check_ranks(config(place, "checkpoint.resume_from=null"), paths, both) == ""
    with pytest.raises(ConfigError):
        check_ranks(config(place), paths, both)


@pytest.mark.torch
def test_a_start_that_will_divide_the_checkpoint_is_announced(place: Path) -> None:
    from tests.verl.fake_shards import fsdp2_step

    run = place / "run/checkpoints/step_000006"
    step = fsdp2_step(run, 6, 2, roles=("",))
    write_manifest(run, 6, world_size=2, guest="verl")
    checked, [note] = check(config(place, "distributed.dp_size=4"), saved(6, 2))
    assert "step_000006 was saved by 2 ranks: the start divides it among 4" in note
    assert not [line for line in checked if "as saved" in line]
    # A save of one file alone cannot be judged here; the start verifies it, and sets it aside.
    (step / "optim_world_size_2_rank_1.pt").unlink()
    _, notes = check(config(place, "distributed.dp_size=4"), saved(6, 2))
    assert notes == []


def test_a_plan_that_does_not_end_is_ended_and_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place / "run/checkpoints/step_000006"
    shard_step(run, 6, 2)  # verl's names, and no torch
    write_manifest(run, 6, world_size=2, guest="verl")
    monkeypatch.setattr(verl_checks, "PLAN_S", -1.0)
    with pytest.raises(ConfigError, match=r"not known in time: .*global_step_6 .*keep 2 ranks") as caught:
        check(config(place, "distributed.dp_size=4"), saved(6, 2))
    assert caught.value.not_looked_at[0] == "verl's own settings"


def test_a_checkpoint_of_elsewhere_is_asked_for_its_ranks_and_a_step_of_plain_verl_taken_over(
    place: Path,
) -> None:
    step = place / "plain" / "global_step_6"
    step.mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"verl-slurm adopt {place}/plain RUN"):
        check(config(place, f"checkpoint.resume_from={step}"))
    other = checkpoint(place / "other", 8, "dist_ckpt/__0_0.distcp")
    with pytest.raises(ConfigError, match="saved with 8"):
        check(config(place, f"checkpoint.resume_from={other}"))
    (other / "manifest.json").write_bytes(b"{}")
    check(config(place, f"checkpoint.resume_from={other}"))


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files", "actor_rollout_ref.model.path"])
def test_in_front_of_a_container_every_place_is_to_be_named(place: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="pip install verl"):
        check(config(place), version=None)
    boxed = config(place, "slurm.container={runtime: apptainer, image: /i.sif}", entry="ppo")
    assert "container" in check(boxed, version=None)[1][0]
    with pytest.raises(DataError, match=f"set verl.{key}"):
        verl = {name: value for name, value in boxed.verl.items() if name != key}
        check(msgspec.structs.replace(boxed, verl=verl), version=None)


def test_a_run_that_has_begun_with_a_switch_as_text_goes_on_as_it_began(place: Path) -> None:
    given = config(place, "verl.trainer.balance_batch='False'", entry="ppo")
    with pytest.raises(ConfigError, match="without quotes"):
        check(given)
    run_yaml = RunPaths(given.run_dir).run_yaml
    run_yaml.parent.mkdir()
    run_yaml.touch()
    check(given)


@pytest.mark.parametrize("container", ["null", "{runtime: apptainer, image: /i.sif}"])
def test_what_verl_cannot_do_is_refused_with_and_without_a_verl_to_ask(place: Path, container: str) -> None:
    for word in ("trainer.use_v1=false", "trainer.default_local_dir=/tmp/x"):
        given = config(place, f"slurm.container={container}", f"verl.{word}", entry="ppo")
        with pytest.raises(VerlSlurmError, match=word.partition("=")[0]):
            check(given)


def test_a_release_that_is_too_old_or_lacks_modules_is_refused_and_an_unknown_one_said(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"0\.3\.0"):
        check(config(place), version="0.3.0")
    checked, (note,) = check(config(place), version="0.99.0")
    assert "verl 0.99.0 is installed" in checked
    assert "never run under verl-slurm" in note
    # What pip does not bring with verl is named for pip.
    monkeypatch.setattr(verl_checks, "_BESIDES", {"sft": {"no_such_module_of_ours": "its-name"}, "ppo": {}})
    with pytest.raises(ConfigError, match="pip install its-name"):
        check(config(place))


def test_verl_is_found_without_being_imported_even_as_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "verl" / "version" / "version").write_text("9.9.9\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "verl")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)

    def nothing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    assert installed_verl() == "9.9.9"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert installed_verl() is None


@pytest.mark.parametrize(
    ("word", "where"),
    [
        ("verl.data.train_files=/no/such.parquet", "/no/such.parquet"),
        ("verl.data.val_files=[/no/val.parquet]", "/no/val.parquet"),
        ("verl.data.train_files=not/there.parquet", "data.train_files"),
        ("verl.model.path=/no/model", "/no/model"),
    ],
)
def test_what_is_not_there_is_refused_with_the_key_to_set(place: Path, word: str, where: str) -> None:
    with pytest.raises(DataError) as caught:
        check(config(place, word))
    assert where in caught.value.one_line()
    assert "set verl." in caught.value.one_line()


def test_verls_own_default_is_named_as_such(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    with pytest.raises(DataError, match="verl's own default"):
        check(parse_config(b"trainer: {backend: verl}\n", "x.yaml"))


def test_a_model_that_was_cut_off_cannot_be_trained_or_is_none_is_refused(place: Path) -> None:
    weights = place / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(DataError, match="damaged"):
        check(config(place))
    (place / "model/config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    with pytest.raises(DataError, match="an encoder with a decoder"):
        check(config(place))
    weights.unlink()
    with pytest.raises(DataError, match="no weights"):
        check(config(place))
    (place / "model/config.json").unlink()
    with pytest.raises(DataError, match=r"config\.json"):
        check(config(place))


def test_names_of_the_hub_and_other_servers_are_believed_and_said(place: Path) -> None:
    given = config(place, "verl.model.path=Qwen/Qwen2.5-0.5B", "verl.data.train_files=hdfs://n/x.parquet")
    notes = check(given)[1]
    assert any("Hugging Face hub" in note for note in notes)
    assert any("hdfs://n/x.parquet" in note for note in notes)
    # Relative paths that exist are made absolute, and names are left.
    words = ("verl.data.train_files=[train.parquet, other.parquet]", "verl.model.path=model")
    found = absolute(config(place, *words), place).verl
    assert found["data.train_files"] == [f"{place}/train.parquet", "other.parquet"]
    assert found["model.path"] == f"{place}/model"
    assert absolute(config(place, "verl.model.path=Qwen/x"), place).verl["model.path"] == "Qwen/x"


def test_the_size_of_a_first_save_is_estimated_from_the_models_files(place: Path) -> None:
    size = checkpoint_size(config(place), [])
    assert size is not None
    assert size[0] == 10_000 * 12
    assert checkpoint_size(config(place, "verl.model.path=Qwen/x"), []) is None


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ("verl.data.train_batch_size=8", ""),
        ("verl.data.train_batch_size=5", r"4 ranks on 2 nodes.*data.train_batch_size=5"),
        ("verl.actor_rollout_ref.actor.ppo_mini_batch_size=2", ""),
        ("verl.actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor.ppo_mini_batch_size=1"),
        ("verl.actor_rollout_ref.rollout.tensor_model_parallel_size=4", r"2 ranks on 1 node:.*tensor_model"),
        ("verl.actor_rollout_ref.actor.strategy=megatron", "strategy=megatron"),
    ],
)
def test_fewer_nodes_are_refused_where_verl_could_not_go_on_with_them(
    place: Path, changed: str, complaint: str
) -> None:
    given = config(
        place,
        "distributed.dp_size=4",
        "distributed.nodes=2",
        "distributed.min_nodes=1",
        "verl.algorithm.adv_estimator=grpo",
        "verl.data.train_batch_size=8",
        "verl.actor_rollout_ref.rollout.n=2",
        "verl.actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "verl.actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "verl.actor_rollout_ref.actor.strategy=fsdp2",
        "verl.actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        changed,
        entry="ppo",
    )
    if complaint:
        with pytest.raises(ConfigError, match=complaint):
            check(given)
    else:
        check(given)


def ppo(place: Path, *words: str, **others: object) -> RunConfig:
    given = config(place, entry="ppo")
    verl = given.verl | dict(word.split("=", 1) for word in words)
    return msgspec.structs.replace(given, verl=verl, **others)


NEW, OLD = "reward.custom_reward_function", "custom_reward_function"
TURNS = "actor_rollout_ref.rollout.multi_turn"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([f"{NEW}.path=PLACE/gone.py", f"{NEW}.name=f"], "file that verl reads is not there: verl.reward"),
        ([f"{NEW}.path=gone/r.py", f"{NEW}.name=f"], "file that verl reads is not there"),
        ([f"{OLD}.path=PLACE/gone.py", f"{OLD}.name=f"], "file that verl reads is not there: verl.custom"),
        ([f"{OLD}.path=PLACE/reward.py"], "verl.custom_reward_function.name"),
        (
            [f"{NEW}.path=file://PLACE/reward.py", f"{NEW}.name=g"],
            "nothing named 'g', expected one of f",
        ),
        (
            [f"{NEW}.path=PLACE/reward.py", f"{NEW}.name=f"],
            "lacks a module: PLACE/reward.py (found no vs_not_there",
        ),
        ([f"{NEW}.path=pkg://vs_not_there.x", f"{NEW}.name=f"], "found no vs_not_there"),
        (["data.custom_cls.path=PLACE/gone.py", "data.custom_cls.name=D"], "verl.data.custom_cls.path"),
        ([f"{TURNS}.tool_config_path=PLACE/gone.yaml"], "tool_config_path: PLACE/gone.yaml"),
        (
            [f"{TURNS}.tool_config_path=PLACE/tools.yaml"],
            "lacks a module: PLACE/tools.yaml (found no vs_tools",
        ),
        ([f"{TURNS}.interaction_config_path=gone.yaml"], "interaction_config_path"),
        (["actor_rollout_ref.model.external_lib=vs_not_there.x"], "found no vs_not_there"),
        (
            ["actor_rollout_ref.rollout.name=sglang"],
            "verl.actor_rollout_ref.rollout.name=sglang (found no sglang",
        ),
        (["trainer.logger=wandb"], "verl.trainer.logger=wandb (found no wandb"),
        (["trainer.logger=tensorbord"], "verl has no such logger: verl.trainer.logger (found tensorbord"),
        (["actor_rollout_ref.actor.strategy=torchtitan"], "strategy=torchtitan (found no torchtitan"),
        (
            ["actor_rollout_ref.actor.strategy=fsdp"],
            "or add ++actor_rollout_ref.model.override_config.attn_implementation=sdpa after",
        ),
    ],
)
def test_a_file_a_function_a_module_or_an_engine_that_is_not_there_is_refused(
    place: Path, words: list[str], found: str
) -> None:
    (place / "reward.py").write_text("import vs_not_there\ndef f(): pass\n")
    (place / "tools.yaml").write_text("tools:\n  - class_name: vs_tools.search.Tool\n    config: {}\n")
    given = with_verl(ppo(place, *(word.replace("PLACE", str(place)) for word in words)), place)
    with pytest.raises(VerlSlurmError) as caught:
        check(given)
    assert found.replace("PLACE", str(place)) in caught.value.one_line()


def test_all_that_is_missing_is_said_at_once_and_what_nobody_can_see_is_said(place: Path) -> None:
    words = ["actor_rollout_ref.rollout.name=sglang", f"{TURNS}.tool_config_path=/gone.yaml"]
    with pytest.raises(VerlSlurmError) as caught:
        check(ppo(place, *words))
    assert len(caught.value.lines()) == 2
    with pytest.raises(VerlSlurmError) as caught:
        check(ppo(place, "actor_rollout_ref.rollout.name=???", *words[1:]))
    unset, gone, unseen = caught.value.lines()
    assert unseen.endswith("verl's own judgement of its settings")
    assert "found ???, expected one of vllm" in unset
    assert "/gone.yaml" in gone
    _, notes = check(ppo(place, "actor_rollout_ref.rollout.name=mine"))
    assert notes[0].startswith(
        "not looked at: verl.actor_rollout_ref.rollout.name=mine, which is none of verl's"
    )
    boxed = ppo(place, *words)
    inside = msgspec.structs.replace(boxed.slurm, container=ContainerConfig(image="docker://x"))
    _, notes = check(msgspec.structs.replace(boxed, slurm=inside))
    assert [note.startswith("not looked at: ") for note in notes] == [True] * 4


def with_verl(given: RunConfig, place: Path) -> RunConfig:
    """A verl that is found by the ranks' Python, and has rewards for some data."""
    folder = place / "packages/verl/utils/reward_score"
    folder.mkdir(parents=True)
    (folder.parent / "tracking.py").write_text('supported_backend = ["console", "wandb"]')
    (place / "packages/verl/__init__.py").write_text("raise SystemExit('imported')")
    (folder / "__init__.py").write_text(REWARDS)
    return msgspec.structs.replace(given, env={"PYTHONPATH": str(place / "packages")})


OWN = ["reward.custom_reward_function.path=PLACE/f.py", "reward.custom_reward_function.name=f"]
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("columns", "words", "found"),
    [
        ({}, [], ""),
        ({"data_source": "aime2024"}, [], ""),
        (
            {"data_source": "mine"},
            [],
            "no reward for this data.*row 1 .found data_source 'mine'.*openai/gsm8k",
        ),
        ({"data_source": "mine"}, OWN, ""),
        ({"data_source": None}, [], "expected a value under 'data_source'"),
        ({"data_source": None}, OWN, "expected a value under 'data_source'"),
        ({"data_source": None, "reward_model": None}, ["reward.reward_model.enable=true"], ""),
        ({"reward_model": None}, [], "expected a value under 'reward_model.ground_truth'"),
        ({"reward_model": {"ground_truth": None, "style": "x"}}, [], "found null, expected a value under"),
        ({"reward_model": {"ground_truth": None, "style": "x"}}, OWN, ""),
        ({}, ["data.prompt_key=question"], "found keys .*expected a value under 'question'"),
        ({"prompt": "1+1="}, [], "a row holds no conversation"),
        ({}, ["data.train_batch_size=1024"], "fewer rows than one batch.*found 1024, and 64 rows"),
        ({}, ["data.train_batch_size=32", "data.train_max_samples=16"], "and 16 rows"),
        ({}, ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=16"], "larger than the batch"),
        ({}, ["data.train_files=PLACE/model"], "verl does not read such a file.*found a directory"),
        ({}, ["data.train_files=[PLACE/t-0-of-2.parquet]"], "no t-1-of-2.parquet"),
    ],
)
def test_data_that_verl_could_not_train_on_is_refused(
    place: Path, columns: dict[str, object], words: list[str], found: str
) -> None:
    write_verl_rows(place / "train.parquet", **columns)
    write_verl_rows(place / "t-0-of-2.parquet")
    (place / "f.py").write_text("def f(): pass\n")
    told = (f"verl.{word.replace('PLACE', str(place))}" for word in words)
    given = with_verl(config(place, "verl.algorithm.adv_estimator=grpo", *told, entry="ppo"), place)
    if found:
        with pytest.raises(VerlSlurmError, match=found):
            check(given)
        return
    checked, _ = check(given)
    [good] = [line for line in checked if line.startswith("verl.data.train_files")]
    assert "1 file, 64 rows with prompt" in good


@pytest.mark.parametrize(
    ("entry", "words", "said"),
    [
        (
            "ppo",
            ["data.max_prompt_length=512"],
            "prompt of verl.data.train_files exceeds .*=512: .*from the left",
        ),
        (
            "ppo",
            ["data.max_prompt_length=512", "actor_rollout_ref.rollout.prompt_length=256"],
            r"exceeds verl\.actor_rollout_ref\.rollout\.prompt_length=256: verl cuts it from the left",
        ),
        (
            "ppo",
            ["data.max_prompt_length=512", "data.filter_overlong_prompts=true"],
            "max_prompt_length=512: verl drops it, and the rows are counted with it here",
        ),
        ("sft", ["data.max_length=1024", "data.truncation=error"], "max_length=1024: verl ends there"),
        ("sft", ["data.max_length=1024", "data.truncation=right"], "max_length=1024: verl cuts it"),
    ],
)
def test_what_verl_does_with_rows_that_are_too_long_is_said(
    place: Path, entry: str, words: list[str], said: str
) -> None:
    given = with_verl(config(place, *(f"verl.{word}" for word in words), entry=entry), place)
    [note] = [note for note in check(given)[1] if "exceeds" in note]
    assert note.startswith("not looked at: whether a ")
    assert re.search(said, note), note


def test_what_verl_itself_refuses_is_refused_with_its_words(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = with_verl(config(place, entry="ppo"), place)
    verl_says(monkeypatch, '["[actor] Please set at least one of ...", "actor_rollout_ref.actor"]')
    with pytest.raises(
        ConfigError, match=r"verl refuses its settings: verl\.actor_rollout_ref\.actor .*Please set"
    ):
        check(given)
    assert check(given, saved(6, 2)), "it has trained with them"
    verl_says(monkeypatch, "", "no module named verl")
    assert "not looked at: verl's own judgement of its settings: no module named verl" in check(given)[1]
    verl_says(monkeypatch, "goodbye")
    assert any("not understood: goodbye" in note for note in check(given)[1])


def test_what_verl_will_train_is_said_with_its_defaults(place: Path) -> None:
    given = config(place, "verl.trainer.total_epochs=3", "verl.optim.lr=0.001")
    with mock.patch.object(verl_checks, "installed_verl", return_value="0.9.1"):
        *_, trained = check_verl(given, RunPaths(given.run_dir), ())
    assert trained == "verl, sft, 3 epochs, lr 0.001"
    words = ["verl.algorithm.adv_estimator=grpo", "verl.actor_rollout_ref.rollout.n=1"]
    given = with_verl(config(place, *words, entry="ppo"), place)
    assert any("of a single one the advantage is its raw reward" in note for note in check(given)[1])


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        ([], False),
        (["verl.trainer.val_before_train=true"], True),
        (["verl.trainer.val_before_train=false"], False),
    ],
)
def test_a_validation_before_each_start_is_said(place: Path, words: list[str], is_said: bool) -> None:
    _, notes = check(with_verl(config(place, *words, entry="ppo"), place))
    assert any("each start validates again before its first step" in note for note in notes) is is_said


def test_the_conversations_of_supervised_training_are_looked_at(place: Path) -> None:
    assert "verl.data.train_files: 1 file, 64 rows with messages" in check(config(place))[0]
    with pytest.raises(DataError, match=r"under 'turns'.*set verl\.data\.messages_key"):
        check(config(place, "verl.data.messages_key=turns"))
    with pytest.raises(ConfigError, match="fewer rows than one batch"):
        check(config(place, "verl.data.train_batch_size=128"))
    # verl ends with its epochs, without a word.
    more = [
        "verl.data.train_batch_size=8",
        "verl.trainer.total_epochs=2",
        "verl.trainer.total_training_steps=17",
    ]
    with pytest.raises(ConfigError, match="the data ends before the last step.*have at most 16 steps"):
        check(config(place, *more))
    grpo = config(place, *more, "verl.algorithm.adv_estimator=grpo", entry="ppo")
    assert any(
        "verl ends there; raise verl.trainer.total_epochs" in note
        for note in check(with_verl(grpo, place))[1]
    )
    # The list is the user's: a shard that lies there is left out, and a note says so.
    for number in (0, 1):
        write_verl_rows(place / f"t-{number}-of-2.parquet")
    _, notes = check(config(place, f"verl.data.train_files=[{place}/t-0-of-2.parquet]"))
    assert "no t-1-of-2.parquet (1 of 2 shards missing)" in notes[0]


def test_what_is_not_known_of_verls_data_is_not_called_good(place: Path) -> None:
    write_verl_rows(place / "train.parquet", data_source=None)
    (place / "loops.yaml").write_text("- name: x\n  _target_: json.Loop\n")
    (place / "own.py").write_text("class D: pass\n")
    own = ["data.custom_cls.path=PLACE/own.py", "data.custom_cls.name=D"]
    loops = ["actor_rollout_ref.rollout.agent.agent_loop_config_path=PLACE/loops.yaml"]
    manager = ["reward.reward_manager.source=importlib", "reward.reward_manager.name=M"]
    for words, said in (
        (own, "the rows of verl.data.train_files: the class of"),
        (loops, "which the agent loops of"),
        (loops, "the classes that"),
        (manager, "which the reward manager M may decide"),
        (["data.train_files=${oc.env:DATA}"], "verl.data.train_files, which the job's environment decides"),
    ):
        checked, notes = check(ppo(place, *(word.replace("PLACE", str(place)) for word in words)))
        assert any(note.startswith("not looked at: ") and said in note for note in notes), notes
        assert not any("data_source" in line for line in checked)
    (place / "loops.yaml").write_text("- name: x\n  _target_: vs_not_there.Loop\n")
    with pytest.raises(ConfigError, match="no vs_not_there"):
        check(ppo(place, loops[0].replace("PLACE", str(place))))
    (place / "loops.yaml").write_text("- name: [x\n")
    with pytest.raises(DataError, match="cannot be read"):
        check(ppo(place, loops[0].replace("PLACE", str(place))))
