"""Bad input: one clear line with its remedy, its exit code, and nothing left behind."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from verl_slurm.base.errors import DataError, PermissionRefused
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.checkpoint.decide.storage import FreeSpace
from verl_slurm.checkpoint.store import medium
from verl_slurm.config.checks import rollout as rollout_checks
from verl_slurm.config.load import load
from verl_slurm.config.schema import DataConfig, RunConfig
from verl_slurm.submit.checks.prompt_data import check_data
from verl_slurm.submit.checks.run_directory import check_run_dir

pytestmark = pytest.mark.usefixtures("nothing_left")
Cli = Callable[..., Any]
User = Callable[[], AbstractContextManager[None]]


def test_an_engine_that_is_not_there_or_cannot_take_the_model_is_refused(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("submit", "config.yaml", "rollout.engine=vllm", "distributed.device=cpu", "--cluster", "local")
    monkeypatch.setattr(rollout_checks, "find_spec", lambda _: None)
    result = cli(*words)
    assert result.code == ExitCode.CONFIG
    assert "vLLM is not installed here: rollout.engine" in result.error
    monkeypatch.setattr(rollout_checks, "find_spec", lambda _: True)
    result = cli(*words, "model.path=builtin:tiny")
    assert result.code == ExitCode.CONFIG
    assert "builtin:tiny: rollout.engine (found vllm, and a model with heads of 16" in result.error


def test_a_refusal_is_json_where_json_was_asked_for(workplace: Path, cli: Cli) -> None:
    result = cli("submit", "config.yaml", "train.stepz=3", "--json")
    assert result.json["exit_code"] == ExitCode.CONFIG
    assert "train.steps" in result.json["error"]
    result = cli("status", "--json")
    assert result.code == result.json["exit_code"] == ExitCode.USAGE


def test_one_answer_has_unknown_keys_wrong_values_missing_files_and_programs(
    workplace: Path, cli: Cli
) -> None:
    words = [
        "train.stepz=3",
        "checkpoint.every_steps=often",
        "data.root=none",
        "hooks.on_end=[no-such-program]",
    ]
    result = cli("submit", "config.yaml", *words, "--cluster", "local")
    assert result.code == ExitCode.CONFIG
    for part in ("train.stepz", "'often'", "no such data directory", "no program no-such-program"):
        assert any(part in line for line in result.errors)
    unseen = "directories above the run; earlier runs of this name; code; room on the disk"
    said = f"not looked at yet, since it goes by what is wrong: {unseen}"
    assert result.err.endswith(f"\nverl-slurm: {said}\n")
    again = cli("submit", "config.yaml", *words, "--cluster", "local", "--json").json
    assert again["error"].endswith(f" | {said}")
    assert again["exit_code"] == ExitCode.CONFIG


@pytest.fixture
def closed_place() -> Iterator[Path]:
    """A directory below which an ordinary user may neither write nor read."""
    base = Path(tempfile.mkdtemp(prefix="vs-closed-"))
    base.chmod(0o755)
    (base / "locked").mkdir()
    (base / "locked" / "a.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (base / "locked" / "my.yaml").write_text("seed: 1\n")
    (base / "locked" / "a.jsonl").chmod(0)
    (base / "locked" / "my.yaml").chmod(0)
    (base / "locked").chmod(0o555)
    try:
        yield base / "locked"
    finally:
        (base / "locked").chmod(0o755)
        shutil.rmtree(base)


def test_no_write_permission_is_refused_before_anything_is_made(
    workplace: Path, cli: Cli, closed_place: Path, ordinary_user: User
) -> None:
    with ordinary_user(), pytest.raises(PermissionRefused, match="no write permission in") as caught:
        check_run_dir(closed_place / "runs" / "demo")
    assert caught.value.exit_code is ExitCode.PERMISSION
    assert "choose another run_dir" in caught.value.one_line()
    assert not (closed_place / "runs").exists()
    # Its owner's run would begin again in another one.
    (closed_place / "run.yaml").touch()
    closed_place.chmod(0o500)
    with ordinary_user():
        owner = os.geteuid()
    os.chown(closed_place, owner, -1)
    with ordinary_user(), pytest.raises(PermissionRefused, match="a job that it has waits for that"):
        check_run_dir(closed_place)


def test_an_unreadable_configuration_and_unreadable_data_are_refused(
    workplace: Path, closed_place: Path, ordinary_user: User
) -> None:
    config = msgspec.structs.replace(RunConfig(), data=DataConfig(root=str(closed_place)))
    with ordinary_user():
        with pytest.raises(PermissionRefused, match=r"cannot be read.*Permission denied"):
            load(closed_place / "my.yaml")
        with pytest.raises(DataError, match=r"cannot be read.*Permission denied.*chmod u\+r"):
            check_data(config)


@pytest.mark.usefixtures("without_slurm")
def test_a_doctor_without_slurm_still_tells_what_it_found_of_storage(workplace: Path, cli: Cli) -> None:
    result = cli("doctor", "--config", "config.yaml")
    assert result.code == ExitCode.UNFIT  # as for every finding that is BAD
    assert "run_dir" in result.out
    assert "left out, since they go by it: partition, Slurm's settings, bad nodes" in result.out
    topics = [
        finding["topic"] for finding in cli("doctor", "--config", "config.yaml", "--json").json["findings"]
    ]
    assert topics[-1] == "Slurm"
    assert len(topics) > 1


@pytest.mark.slurm
def test_a_slurm_that_does_not_answer_is_never_replaced_by_this_machine(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("scontrol") is None:
        pytest.skip("no Slurm installed")
    monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")
    result = cli("submit", "config.yaml")
    assert result.code == ExitCode.NO_SLURM
    # Above it stands what is waited for.
    assert "Slurm does not answer" in result.errors[-1]


def test_a_directory_of_something_else_is_no_run_for_any_command(workplace: Path, cli: Cli) -> None:
    words = dict.fromkeys(("status", "watch", "logs", "cancel", "requeue"), "not a run directory")
    words |= dict.fromkeys(("verify", "inspect data"), "neither a run nor a checkpoint: data")
    for command, said in (words | {"submit": "a directory, but not a run: data"}).items():
        result = cli(*command.split(), "data")
        assert result.code == ExitCode.NOT_FOUND
        assert said in result.error


def test_a_mistyped_command_is_answered_with_the_nearest(workplace: Path, cli: Cli) -> None:
    result = cli("stauts", "data")
    assert result.code == ExitCode.USAGE
    assert "Did you mean status?" in result.err


def test_a_new_run_is_told_of_the_checkpoints_that_an_earlier_run_of_its_name_left_in_a_tier(
    workplace: Path, cli: Cli, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tier = tmp_path_factory.mktemp("cold")
    for run, step in (("demo-0123456789abcdef", 2), ("demo-0123456789abcdef", 10), ("demo-two", 99)):
        (step_dir := tier / "verl-slurm" / run / f"step_{step:06d}").mkdir(parents=True)
        (step_dir / "manifest.json").touch()
    (tier / "verl-slurm/demo-0123456789abcdef/step_000020").mkdir()  # not whole
    words = ("--cluster", "local", "--dry-run", f"tiers=[{{name: cold, kind: archive, path: {tier}}}]")
    result = cli("submit", "config.yaml", *words)
    newest = f"checkpoint.resume_from={tier}/verl-slurm/demo-0123456789abcdef/step_000010"
    assert f"tier cold has checkpoints of an earlier one of this name, and {newest} goes on" in result.err


def test_a_dry_run_leaves_nothing_behind(workplace: Path, cli: Cli) -> None:
    result = cli("submit", "config.yaml", "--cluster", "local", "--dry-run")
    assert result.code == 0
    assert "-m verl_slurm_daemon lead --run" in result.out.splitlines()[-1]
    assert len(result.out.splitlines()) == 1
    assert "  good  configuration\n" in result.err
    assert f"  good  model {workplace / 'model'}\n" in result.err
    assert "a new run" in result.err
    assert f"run directory {workplace / 'runs' / 'demo'}" in result.err


def test_a_model_that_no_job_could_load_is_refused(workplace: Path, cli: Cli) -> None:
    model = workplace / "model"
    (model / "tokenizer_config.json").write_text("{}")
    good = {path: path.read_bytes() for path in model.iterdir()}
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    size = len(header).to_bytes(8, "little")
    for name, content, part in (
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"{}", "expected text under 'model_type'"),
        ("tokenizer.json", None, "has no tokenizer"),
        ("model.safetensors", b"version https://git-lfs", "a header of"),
        ("model.safetensors", size + header + b"123", "its header says"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0[]", "not one of safetensors"),
    ):
        if content is None:
            (model / name).unlink()
        else:
            (model / name).write_bytes(content)
        result = cli("submit", "config.yaml", "--cluster", "local", "--dry-run")
        assert (result.code, part in result.error) == (ExitCode.DATA, True), result.error
        for path, data in good.items():
            path.write_bytes(data)
    (model / "tokenizer_config.json").unlink()
    (model / "model.safetensors").write_bytes(size + header + b"1234")
    assert cli("submit", "config.yaml", "--cluster", "local", "--dry-run").code == 0


@pytest.mark.parametrize(
    ("word", "code", "part"),
    [
        ("model.path=Qwen/Qwen2-0.5B", ExitCode.DATA, "`hf download Qwen/Qwen2-0.5B --local-dir DIR` first"),
        ("model.reward=classifier:/nope", ExitCode.DATA, "or to rule:arithmetic"),
        ("run_dir=$HOME/x", ExitCode.CONFIG, "not expanded: run_dir"),
        ("checkpoint.resume_from=step_000001", ExitCode.NOT_FOUND, "runs/demo/checkpoints/step_000001"),
        ("checkpoint.resume_from=nowhere", ExitCode.NOT_FOUND, "no such checkpoint to resume from"),
    ],
)
def test_what_a_job_would_find_out_is_found_out_by_a_dry_run(
    workplace: Path, cli: Cli, word: str, code: ExitCode, part: str
) -> None:
    result = cli("submit", "config.yaml", word, "--cluster", "local", "--dry-run")
    assert result.code == code
    assert part in result.error
    assert "builtin:tiny" not in result.error


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("checkpoint.local_dir=/local/$USED", "variables in paths are not expanded: checkpoint.local_dir"),
        ("tiers=[{name: cold, kind: archive, path: /cold/$USED}]", "not expanded: tiers[0].path"),
        ("slurm.container={image: x.sif, binds: [/data/$USED]}", "not expanded: slurm.container.binds[0]"),
        ("env={HF_HOME: $USED/hf}", "env.HF_HOME (found $USED); write it out; or in its place slurm.setup"),
        ("env={LATE: '/opt:${LATE}'}", "env.LATE (found $LATE)"),
        ("trainer.command=[train.py, --out, $USED/out]", "trainer.command[2] (found $USED)"),
        ("trainer.command=[train.py, --out=~/out]", "trainer.command[1] (found ~/)"),
        (
            "services={judge: {command: [serve, /tmp/$SLURM_JOB_ID]}}",
            "services.judge.command[1] (found $SLURM_JOB_ID)",
        ),
        ("services={judge: {command: [bash, serve.sh, $USED]}}", "services.judge.command[2] (found $USED)"),
        ("services={judge: {command: [serve], env: {A: $USED}}}", "services.judge.env.A (found $USED)"),
        ("hooks.on_end=[/bin/true, $USED]", "hooks.on_end[1] (found $USED)"),
        ("slurm.extra={comment: $USED}", "slurm.extra.comment (found $USED)"),
        ("trainer={backend: verl, entry: sft}|verl={data.train_files: $USED/x}", "train_files (found $USED)"),
    ],
)
def test_what_only_a_shell_would_expand_is_refused_where_it_is_not_expanded(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, word: str, part: str
) -> None:
    monkeypatch.setenv("USED", "/there")
    result = cli("submit", "config.yaml", *word.split("|"), "--cluster", "local", "--dry-run")
    assert result.code == ExitCode.CONFIG
    assert any(part in line for line in result.errors), result.error


def test_a_dollar_that_is_no_variable_or_that_a_shell_reads_is_taken_though_not_expanded(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USED", "/there")
    service = "services={judge: {command: [/bin/bash, -lc, 'exec serve $USED ~/x']}}"
    words = (
        "env={PRICE: 'US$5', END: '^a$'}",
        "hooks.on_end=[/bin/true, 'it is $unknown', ~user, a~/b]",
        service,
    )
    result = cli("submit", "config.yaml", *words, "--cluster", "local", "--dry-run")
    assert result.code == 0, result.error


def test_another_user_s_run_is_one_line_and_does_not_hide_the_others(
    workplace: Path, cli: Cli, closed_place: Path, ordinary_user: User
) -> None:
    (closed_place / "theirs").mkdir(mode=0o700)
    (closed_place / "theirs" / "run.yaml").touch()
    with ordinary_user():
        for words in (
            ("verify", closed_place / "theirs"),
            ("status", closed_place / "theirs"),
            ("submit", closed_place / "theirs"),
            ("submit", closed_place / "my.yaml"),
            ("list", closed_place / "theirs"),
        ):
            result = cli(*words)
            assert (result.code, bool(result.error)) == (ExitCode.PERMISSION, True), words
        listed = cli("list", closed_place)
    assert listed.code == 0
    assert "no permission" in listed.out


def test_a_file_system_without_room_for_one_checkpoint_is_refused_before_anything_is_queued(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4000)
    (workplace / "model" / "model.safetensors").write_bytes(data)
    monkeypatch.setattr(medium, "free_space", lambda _: FreeSpace(bytes=10_000, inodes=10**6))
    result = cli("submit", "config.yaml", "--cluster", "local")
    assert result.code == ExitCode.NO_ROOM
    assert "there is no room for a single checkpoint" in result.error
    assert "0.01 MB free, 0.108 MB needed (an estimate, 0.001 million parameters and " in result.error
    assert not (workplace / "runs").exists()
