"""The configuration file: what is read, what is refused, and with which line."""

import re
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from tests.builders import begun_run, run_config, write_config
from verl_slurm.base import shipped as shipped_module
from verl_slurm.base.errors import ConfigError, NotFound
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.shipped import shipped
from verl_slurm.config.changes import require_in_place
from verl_slurm.config.hints import WORDS, nearest_keys
from verl_slurm.config.load import differences, dump, known_keys, load, load_resolved, parse_config
from verl_slurm.config.schema import RunConfig, SlurmConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def refusal(text: bytes | str, *overrides: str) -> str:
    raw = text.encode() if isinstance(text, str) else text
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, "my.yaml", overrides)
    assert caught.value.exit_code is ExitCode.CONFIG
    line = caught.value.one_line()
    assert "\n" not in line
    assert "; " in line, "an error without a remedy"
    return line


def test_an_empty_file_is_the_defaults() -> None:
    assert parse_config(b"", "my.yaml") == RunConfig()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_example_in_configs_loads(path: Path) -> None:
    assert load(path).name


def test_overrides_are_typed_and_win_over_the_file() -> None:
    config = parse_config(
        b"train:\n  steps: 3\n",
        "my.yaml",
        ["train.steps=4", "train.steps=5", "train.actor_lr=1e-4", "deterministic=false"],
    )
    assert (config.train.steps, config.train.actor_lr, config.deterministic) == (5, 1e-4, False)


def test_text_keys_take_an_override_as_it_stands() -> None:
    config = parse_config(b"", "my.yaml", ["slurm.account=007", "name=12", "slurm.partition=null"])
    assert (config.slurm.account, config.name, config.slurm.partition) == ("007", "12", None)


def test_sbatch_options_are_free_form() -> None:
    config = parse_config(b"", "my.yaml", ["slurm.extra={exclusive: true}", "slurm.extra.constraint=a100"])
    assert config.slurm.extra == {"exclusive": True, "constraint": "a100"}


def test_a_section_heading_without_lines_is_the_defaults() -> None:
    assert parse_config(b"slurm:\n", "my.yaml").slurm == SlurmConfig()


@pytest.mark.scenario("USE18")
@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("train:\n  stepz: 3\n", "my.yaml:2: train.stepz", "train.steps"),
        ("trian:\n  steps: 3\n", "my.yaml:2: trian.steps", "train.steps"),
        ("steps: 3\n", "my.yaml:1: steps", "train.steps"),
        ("slurm:\n  time_limit: 3\n", "my.yaml:2: slurm.time_limit", "slurm.time_limit_min"),
        ("slurm:\n  gpus: 1\n", "my.yaml:2: slurm.gpus", "slurm.gpus_per_node"),
        ("optimizer:\n  lr: 0.1\n", "my.yaml:2: optimizer.lr", "train.actor_lr or train.critic_lr"),
        ("learning_rate: 1\n", "my.yaml:1: learning_rate", "train.actor_lr or train.critic_lr"),
        ("checkpoint:\n  keep: 3\n", "my.yaml:2: checkpoint.keep", "checkpoint.keep_last"),
        ("data:\n  max_prompt: 1\n", "my.yaml:2: data.max_prompt", "data.max_prompt_tokens"),
        ("rollout:\n  temprature: 1\n", "my.yaml:2: rollout.temprature", "rollout.temperature"),
        ("nodes: 2\n", "my.yaml:1: nodes", "distributed.nodes"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(text: str, wrong: str, right: str) -> None:
    assert f"no such key: {wrong} (expected {right})" in refusal(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "train.steps: 3\n",
            "my.yaml:1: train.steps (expected a line `train:`, and `steps` indented below it)",
        ),
        ("slurm.extra: {a: b}\n", "my.yaml:1: slurm.extra (expected a line `slurm:`"),
        ("verl.trainer.x: 3\n", "my.yaml:1: verl.trainer.x (expected a line `verl:`"),
        ("a. b: 3\n", "my.yaml:1: a. b"),
        ("train:\n  a.b: 3\n", "my.yaml:2: train.a.b"),
        ("train:\n  steps: 3\ntrain.steps: 4\n", "my.yaml:3: train.steps (expected a line `train:`"),
    ],
)
def test_a_name_with_a_dot_is_no_key_and_its_section_is_named(text: str, said: str) -> None:
    assert f"no such key: {said}" in refusal(text)


SEED = """
train: {total_steps: 9, save_interval: 5, async_checkpoint: true, resume_from: x,
  adaptive_checkpoint: {intervals: [{steps: 5, interval: 1}]}}
model: {actor: {name_or_path: a, use_flash_attn: true}, reward: {name_or_path: b, dtype: c}}
data: {dataset_name: d, split: s, max_length: 9, fingerprint: f}
distributed: {world_size: 8, backend: nccl}
save_every_n_steps: 3
"""


def test_all_unknown_keys_are_refused_at_once_each_with_what_takes_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(SEED.encode(), "my.yaml", ["train.stepz=3"])
    right = {
        line.partition(": ")[2].partition(" (expected ")[0].rpartition(" ")[2]: line.partition("(expected ")[
            2
        ]
        for line in caught.value.lines()
    }
    expected = {
        "train.stepz": "train.steps",
        "train.total_steps": "train.steps",
        "train.save_interval": "checkpoint.every_steps",
        "train.async_checkpoint": "no key: every save is asynchronous",
        "train.resume_from": "checkpoint.resume_from",
        "train.adaptive_checkpoint.intervals": "checkpoint.intervals",
        "model.actor.name_or_path": "model.path",
        "model.actor.use_flash_attn": "model.attn_implementation=flash_attention_2",
        "model.reward.name_or_path": "model.reward=classifier:DIR",
        "model.reward.dtype": "no key: a reward model computes in float32",
        "data.dataset_name": "data.root, a directory",
        "data.split": "data.files",
        "data.max_length": "data.max_prompt_tokens and rollout.max_new_tokens",
        "data.fingerprint": "no key",
        "distributed.world_size": "distributed.dp_size",
        "distributed.backend": "distributed.device",
        "save_every_n_steps": "checkpoint.every_steps",
    }
    assert right.keys() == expected.keys()
    for key, hint in expected.items():
        assert right[key].startswith(hint), key


@pytest.mark.parametrize("word", sorted(WORDS))
def test_what_another_programs_word_is_called_here_exists(word: str) -> None:
    """Also its value: a hint that leads to a second refusal is worse than none."""
    for key, value in re.findall(
        r"\b([a-z_]+(?:\.[a-z_]+)+|run_dir|name|env|tiers)\b(?:=([\w:]+))?", WORDS[word]
    ):
        assert key in known_keys()
        if value:
            assert "wrong value" not in str(_problem(f"{key}={value}"))
    assert word not in known_keys()
    section, _, last = word.rpartition(".")
    assert nearest_keys(word if section else f"x.{last}", known_keys(), ["train"]) == [WORDS[word]]


def _problem(word: str) -> ConfigError | None:
    try:
        parse_config(b"", "my.yaml", [word])
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize(
    "wanted", ["train.save_intervals", "x.name", "optimizer.betas", "trainer.project_name"]
)
def test_no_key_of_another_meaning_is_proposed(wanted: str) -> None:
    assert nearest_keys(wanted, known_keys(), ["train"]) == []


def test_verls_own_sections_are_said_to_belong_below_verl() -> None:
    line = refusal("actor_rollout_ref: {actor: {optim: {lr: 1}}, rollout: {n: 4}}\n")
    assert "expected verl.actor_rollout_ref, with trainer.backend=verl" in line
    assert " | " not in line
    # A section that ours has as well: for a run of verl the key of ours would be refused in its turn.
    assert "one of verl's stands below `verl:`, or after `--`" in refusal("trainer: {total_epochs: 2}\n")


@pytest.mark.scenario("M09", "M10")
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train:\n  steps: '3'\n", ["my.yaml:2: train.steps", "found '3', text", "expected whole number"]),
        ("train:\n  steps: 0\n", ["my.yaml:2: train.steps", "found 0", "expected whole number >= 1"]),
        ("train:\n  steps: 0\n", ["see `verl-slurm config explain train.steps`"]),
        ("train: 3\n", ["expected section"]),
        ("train:\n  steps: 1.5\n", ["found 1.5", "expected whole number"]),
        ("train: 5\n", ["my.yaml:1: train", "found 5"]),
        ("deterministic: yes\n", ["found 'yes', text", "expected true or false"]),
        ("seed: 010\n", ["found '010', text", "expected whole number"]),
        ("seed: 1:30\n", ["found '1:30', text", "expected whole number"]),
        ("train:\n  actor_lr: .inf\n", ["found '.inf', text", "expected number"]),
        ("train:\n  actor_lr: 1e999\n", ["too large", "1e999"]),
        ("model:\n  dtype: float16\n", ["found 'float16'", "expected float32 or bfloat16"]),
        ("slurm:\n  extra:\n    constraint: [a]\n", ["slurm.extra"]),
        (
            "checkpoint:\n  cadence: often\n",
            ["found 'often'", "expected fixed or adaptive or young_daly or continuous"],
        ),
        ("checkpoint:\n  keep_last: 0\n", ["checkpoint.keep_last", "found 0", "expected whole number >= 1"]),
        ("checkpoint:\n  keep_every: -1\n", ["checkpoint.keep_every", "expected whole number >= 0"]),
        ("checkpoint:\n  components: [actor, reward]\n", ["found 'reward'", "expected actor or critic"]),
        (
            "checkpoint:\n  components: actor\n",
            ["checkpoint.components", "expected list of actor or critic"],
        ),
        ("checkpoint:\n  include_optimizer: 1\n", ["checkpoint.include_optimizer", "expected true or false"]),
        (
            "checkpoint:\n  intervals: [{every: 0}]\n",
            ["checkpoint.intervals[0].every", "expected whole number >= 1"],
        ),
        ("checkpoint:\n  intervals: [{until_step: 5}]\n", ["checkpoint.intervals[0]", "`every` in it"]),
        ("checkpoint:\n  intervals: [{every: 5, upto: 9}]\n", ["no `upto` in it"]),
    ],
)
def test_a_wrong_type_is_refused_with_place_and_both_sides(text: str, parts: list[str]) -> None:
    line = refusal(text)
    for part in parts:
        assert part in line


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "my.yaml")


def test_a_missing_file_is_refused_with_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").touch()
    with pytest.raises(ConfigError, match=r"no such configuration.*quickstart\.yaml"):
        load(tmp_path / "quikstart.yaml")


def test_a_dumped_config_is_read_back_the_same() -> None:
    config = parse_config(
        b"",
        "my.yaml",
        ["name=1e3", "slurm.account=no", 'data.root=/d/"x" y', "train.actor_lr=1e-9", "seed=3"],
    )
    assert parse_config(dump(config), "again") == config


@settings(max_examples=60, deadline=None)
@given(
    lr=st.floats(min_value=1e-300, max_value=1e300),
    path=st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=30),
    note=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30),
)
def test_any_value_survives_a_dump(lr: float, path: str, note: str) -> None:
    config = run_config(extra={"comment": note})
    config = msgspec.structs.replace(
        config,
        train=msgspec.structs.replace(config.train, actor_lr=lr),
        data=msgspec.structs.replace(config.data, root="/" + path),
    )
    assert parse_config(dump(config), "again") == config


def test_differences_name_the_dotted_keys() -> None:
    old = RunConfig()
    new = parse_config(b"", "my.yaml", ["train.steps=5", "slurm.extra.constraint=a100"])
    assert differences(old, new) == [("train.steps", 30, 5), ("slurm.extra.constraint", None, "a100")]


def test_a_directory_without_run_yaml_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="not a run directory"):
        load_resolved(tmp_path / "run.yaml")


@pytest.mark.parametrize("share", ["site/share", "share"], ids=["pip --target", "an environment"])
def test_what_ships_is_found_where_pip_put_it(
    share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, name = tmp_path / "site", "sbatch/multi_node.sbatch"
    monkeypatch.setattr(shipped_module, "__file__", str(site / "verl_slurm/base/shipped.py"))
    script = tmp_path / share / "verl-slurm" / name
    script.parent.mkdir(parents=True)
    info = site / "verl_slurm-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: verl-slurm\n")
    (info / "RECORD").write_text(f"../share/verl-slurm/{name},,\n")
    monkeypatch.syspath_prepend(site)
    assert shipped(name) == name, "it is not there"
    script.write_text("")
    assert shipped(name) == str(script)


def test_configurations_batch_scripts_docs_and_constraints_are_all_installed() -> None:
    root = Path(__file__).parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    installed = {
        f"{place.removeprefix('share/verl-slurm/')}/{path.name}"
        for place, globs in declared.items()
        for glob in globs
        for path in root.glob(glob)
    }
    there = {
        str(path.relative_to(root))
        for directory in ("configs", "sbatch", "constraints", "docs")
        for path in (root / directory).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
        # The pictures' raw data.
        if path.name not in ("learning.json", "time-to-steps.json")
    }
    assert installed == there


@pytest.mark.parametrize("of", ["the newest ranks", "the newest checkpoint", "nobody"])
def test_a_run_without_its_run_yaml_is_told_what_brings_it_back(tmp_path: Path, of: str) -> None:
    run = begun_run(tmp_path / "a run")
    config = write_config(run, steps=7)
    run.run_yaml.rename(run.control / "trained_with.yaml")
    if of != "the newest ranks":
        run.trained_with.unlink()
    if of == "the newest checkpoint":
        # One that was encrypted, one that was taken over from another run, one of whole steps and one that is older.
        written = b"\x00\xff", dump(run_config(run_dir="/elsewhere")), dump(config), b"name: older\n"
        names = "step_1000000", "step_000010_sp0002", "step_000010", "step_000009"
        for name, data in zip(names, written, strict=True):
            (run.checkpoints / name).mkdir()
            (run.checkpoints / name / "config.yaml").write_bytes(data)
    with pytest.raises(
        NotFound, match="configuration is gone.*beside control/attempt_000001.claim"
    ) as caught:
        load_resolved(run.run_yaml)
    command = (caught.value.remedy or "").split("`")[1::2]
    assert bool(command) is (of != "nobody")
    for words in command:
        subprocess.run(words, shell=True, check=True)
        assert load_resolved(run.run_yaml) == config


def test_a_run_that_was_moved_has_ways_on_and_its_former_path_is_one_only_while_it_is_there(
    tmp_path: Path,
) -> None:
    here, former = tmp_path / "here", tmp_path / "former"
    here.mkdir()
    config = parse_config(f"run_dir: {former}".encode(), "run.yaml", [])
    with pytest.raises(
        ConfigError, match="; move this one back there, .*name=NEW run_dir=NEW checkpoint.resume_from="
    ):
        require_in_place(here, config, "submit")
    former.mkdir()
    with pytest.raises(ConfigError, match=f"; submit {former}, move this one back there"):
        require_in_place(here, config, "submit")
    former.rmdir()
    former.symlink_to(here)
    require_in_place(here, config, "submit")
