"""The table of typical mistakes: each ends with its exit code and one clear line, before anything is queued."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import fail_storage, snapshot
from tests.many_runs import make_run
from verl_slurm.base.exit_codes import ExitCode

Cli = Callable[..., Any]
Make = Callable[[Path], object]
pytestmark = [pytest.mark.scenario("USE-TABLE"), pytest.mark.usefixtures("without_slurm")]

CONFIG, DATA, OK = ExitCode.CONFIG, ExitCode.DATA, ExitCode.OK


def nothing(place: Path) -> None:
    pass


def yaml(text: str) -> Make:
    return lambda place: (place / "config.yaml").write_text(text)


def file(name: str, text: str) -> Make:
    return lambda place: (place / name).write_text(text)


def reward(text: str) -> Make:
    return file("score.py", text)


# what is wrong: (how it is made, words of submit, exit code, what the line says)
MISTAKES: dict[str, tuple[Make, tuple[str, ...], ExitCode, str]] = {
    "a slip in a key": (nothing, ("train.actr_lr=1",), CONFIG, "(expected train.actor_lr)"),
    "another tool's key": (nothing, ("train.lr=1",), CONFIG, "(expected train.actor_lr or train.critic_lr)"),
    "another tool's section": (nothing, ("optimizer.lr=1",), CONFIG, "(expected train.actor_lr or"),
    "text for a number": (
        nothing,
        ("train.steps=many",),
        CONFIG,
        "found 'many', text, expected whole number",
    ),
    "a blank for =": (nothing, ("train.steps", "50"), CONFIG, "expected KEY=VALUE, e.g. train.steps=50"),
    "a tab in the YAML": (
        yaml("model:\n\tpath: model\n"),
        (),
        CONFIG,
        r"config.yaml:2:1 (found character '\t' that cannot start any token)",
    ),
    "a home of nobody": (
        nothing,
        ("run_dir=~nobody_here/runs/a",),
        CONFIG,
        "for this user: run_dir (found ~no",
    ),
    "a model of nobody": (
        nothing,
        ("model.path=~nobody_here/x",),
        CONFIG,
        "for this user: model.path (found ~no",
    ),
    "a reward of nobody": (
        nothing,
        ("model.reward=classifier:~nobody_here/x",),
        CONFIG,
        "no home directory is known for this user: model.reward",
    ),
    "a null character": (
        yaml('run_dir: "a\\0b"\nmodel: {path: model, reward: "rule:arithmetic"}\ndata: {root: data}\n'),
        (),
        CONFIG,
        "a null character in a path: run_dir",
    ),
    "a model in a circle": (
        lambda place: (place / "circle").symlink_to("circle"),
        ("model.path=circle/x",),
        CONFIG,
        "links that lead in a circle: model.path",
    ),
    "no such model": (nothing, ("model.path=/nowhere",), DATA, "no such model directory: /nowhere"),
    "a name of the hub": (nothing, ("model.path=Qwen/Qwen2-0.5B",), DATA, "`hf download Qwen/Qwen2-0.5B"),
    "no tokenizer": (lambda p: (p / "model/tokenizer.json").unlink(), (), DATA, "has no tokenizer"),
    "no config.json": (lambda p: (p / "model/config.json").unlink(), (), DATA, "not a model directory"),
    "no such data": (nothing, ("data.root=/nowhere",), DATA, "no such data directory: /nowhere"),
    "a file as data": (nothing, ("data.root=data/train.jsonl",), DATA, "(found a file)"),
    "an empty jsonl": (file("data/train.jsonl", ""), (), DATA, "found 1 file without a row"),
    "broken JSON": (file("data/train.jsonl", '{"prompt": "1+1=", answer\n'), (), DATA, "train.jsonl:1"),
    "a wrong prompt_key": (nothing, ("data.prompt_key=question",), DATA, "text under 'question'"),
    "ranks over nodes": (
        nothing,
        ("distributed.dp_size=3",),
        CONFIG,
        "found 3 ranks on 2 nodes, expected the same number of ranks on every node",
    ),
    "a mini-batch that divides nothing": (
        nothing,
        ("train.mini_batch_size_per_device=7",),
        CONFIG,
        "expected a divisor of 64",
    ),
    "a warning longer than the job": (
        nothing,
        ("slurm.time_limit_min=1",),
        CONFIG,
        "found 120 s, expected less than the time limit of 60 s",
    ),
    "cuda with a CPU torch": (
        nothing,
        ("distributed.device=cuda", "slurm.gpus_per_node=1"),
        CONFIG,
        "this machine cannot give the ranks a GPU: distributed.device=cuda",
    ),
    "no such reward file": (
        nothing,
        ("model.reward=python:nowhere.py:score",),
        CONFIG,
        "(found no such file, expected a Python file); set model.reward to python:FILE.py:FUNCTION",
    ),
    "no such function": (
        reward("def other(): ...\n"),
        ("model.reward=python:score.py:score",),
        CONFIG,
        "found nothing named 'score'",
    ),
    "a reward without its kind": (nothing, ("model.reward=score.py:score",), CONFIG, "model.reward"),
    "no such module": (
        nothing,
        ("model.reward=python:nonexist:score",),
        CONFIG,
        "`python -c 'import nonexist'`",
    ),
    "a run directory that is not writable": (
        nothing,
        ("run_dir=/proc/self/run",),
        ExitCode.PERMISSION,
        "the run directory cannot be written",
    ),
    "no Slurm": (nothing, ("--cluster", "slurm"), ExitCode.NO_SLURM, "or use --cluster local"),
    "no such built-in": (
        nothing,
        ("model.path=builtin:huge",),
        CONFIG,
        "no such built-in: model.path (found builtin:huge, expected builtin:tiny or builtin:tiny32)",
    ),
    "no such rule": (nothing, ("model.reward=rule:vibes",), CONFIG, "expected rule:arithmetic"),
    "more tensor-parallel ranks than heads": (
        nothing,
        ("model.path=builtin:tiny", "distributed.tp_size=4"),
        CONFIG,
        "expected a divisor of the model's num_key_value_heads=2",
    ),
    "more stages than layers": (
        nothing,
        ("model.path=builtin:tiny", "distributed.pp_size=4", "train.micro_batch_size_per_device=1"),
        CONFIG,
        "expected at most the model's num_hidden_layers=2",
    ),
    "an empty directory as data": (
        lambda p: (p / "empty").mkdir(),
        ("data.root=empty",),
        DATA,
        "no prompts in the data directory",
    ),
    "rows that are no objects": (file("data/train.jsonl", "3\n"), (), DATA, "found int"),
    "no weights": (lambda p: (p / "model/model.safetensors").unlink(), (), DATA, "has no weights"),
    "data as a reward model": (nothing, ("model.reward=classifier:data",), DATA, "not a model directory"),
    "a file as a directory of runs": (
        nothing,
        ("run_dir=config.yaml/run",),
        ExitCode.PERMISSION,
        "a file is in the way",
    ),
    "data as a run": (
        nothing,
        ("run_dir=data",),
        ExitCode.PERMISSION,
        "holds something that is not a run",
    ),
    "another configuration file": (nothing, ("../nope.yaml",), CONFIG, "not an override: ../nope.yaml"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_its_exit_code_and_leaves_nothing(
    workplace: Path, cli: Cli, name: str
) -> None:
    make, words, code, part = MISTAKES[name]
    make(workplace)
    before = snapshot(workplace)
    cluster = () if "--cluster" in words else ("--cluster", "local")
    result = cli("submit", "config.yaml", *words, *cluster)
    assert result.code == code, result.err
    assert any(part in line for line in result.errors)
    assert all("; " in line for line in result.errors), "a remedy"
    assert snapshot(workplace) == before


@pytest.mark.scenario("USE-SMALL")
@pytest.mark.parametrize("kind", ["ppo", "grpo", "loop", "verl"])
def test_init_writes_a_configuration_that_asks_only_for_what_is_marked(
    workplace: Path, cli: Cli, kind: str
) -> None:
    from verl_slurm.config.load import load

    assert cli("init", "first.yaml", "--for", kind).code == OK
    _, _, place = (workplace / "first.yaml").read_text().split("\n")[0].partition("$schema=file://")
    assert Path(place).name == "schema.json"
    assert Path(place).is_file()
    load(workplace / "first.yaml")
    result = cli("submit", "first.yaml", "--dry-run", "--cluster", "local")
    assert result.code in (CONFIG, DATA, ExitCode.NOT_FOUND), "the path to fill in, or verl, is missing"
    assert cli("init", "first.yaml", "--for", kind).code == ExitCode.PERMISSION, "never overwritten"


@pytest.mark.scenario("USE-SMALL")
def test_a_comparison_takes_names_of_a_run(workplace: Path, cli: Cli) -> None:
    run = workplace / "runs" / "x"
    run.mkdir(parents=True)
    (run / "run.yaml").write_text("name: x\n")
    result = cli("inspect", "--bits", "step_000001", "step_000002", "--run", run)
    assert result.code == ExitCode.NOT_FOUND
    assert str(run / "checkpoints" / "step_000001") in json.dumps(result.error)


@pytest.mark.scenario("USE14")
def test_a_path_in_a_yaml_goes_by_the_directory_of_the_yaml(workplace: Path, cli: Cli) -> None:
    place = workplace / "elsewhere"
    place.mkdir()
    (workplace / "config.yaml").rename(place / "config.yaml")
    (workplace / "data").rename(place / "data")
    result = cli("submit", "elsewhere/config.yaml", "--cluster", "local", "--dry-run")
    assert result.code == OK, result.err
    assert "model.path: model is not beside the YAML, and was found in the working directory" in result.err
    assert "data.root: " not in result.err
    assert f"run directory {workplace / 'runs' / 'demo'}" in result.err, "an output goes by the caller"
    assert "exists beside the YAML" not in result.err
    other = place / "runs" / "demo"
    other.mkdir(parents=True, mode=0o700)
    (other / "run.yaml").touch(0o600)
    again = cli("submit", "elsewhere/config.yaml", "--cluster", "local", "--dry-run")
    assert f"{other} exists beside the YAML; run_dir={other} means it" in again.err


@pytest.mark.scenario("USE14")
def test_a_path_that_exists_in_both_places_is_refused(workplace: Path, cli: Cli) -> None:
    place = workplace / "elsewhere"
    (place / "data").mkdir(parents=True)
    (place / "config.yaml").write_text((workplace / "config.yaml").read_text())
    result = cli("submit", "elsewhere/config.yaml", f"model.path={workplace / 'model'}", "--cluster", "local")
    assert result.code == CONFIG
    assert f"means two things: data.root (found {place / 'data'}, beside the YAML, and " in result.error
    # On the command line it goes by the working directory.
    words = ("elsewhere/config.yaml", "model.path=model", "data.root=data", "--cluster", "local", "--dry-run")
    result = cli("submit", *words)
    assert result.code == OK, result.err
    assert "is not beside the YAML" not in result.err


@pytest.mark.parametrize("words", [("list",), ("status", "run")])
def test_a_directory_that_is_gone_is_no_traceback(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = cli(*words)
    assert (result.code, "is gone; cd to" in result.error) == (ExitCode.NOT_FOUND, True)


@pytest.mark.parametrize(
    "words",
    [("status", "a"), ("list", "a/b"), ("watch", "a"), ("serve", "a"), ("verify", "a"), ("submit", "a")],
    ids=" ".join,
)
def test_links_in_a_circle_are_named(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    result = cli(*words)
    assert (result.code, f"lead in a circle: {words[1]}; " in result.error) == (ExitCode.NOT_FOUND, True)


@pytest.mark.parametrize(
    ("command", "call", "part", "number"),
    [
        ("status", "pread", "events.jsonl", errno.EIO),
        ("status", "preadv", "status.json", errno.ENOTCONN),
        ("list", "listdir", "checkpoints", errno.ESTALE),
        ("watch", "pread", "events.jsonl", errno.ESTALE),
        ("cancel", "pread", "events.jsonl", errno.EIO),
        ("prune", "listdir", "checkpoints", errno.EIO),
    ],
)
def test_storage_that_fails_while_a_run_is_read_is_one_line_with_the_path(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, call: str, part: str, number: int
) -> None:
    run = make_run(tmp_path / "run", "done")
    fail_storage(call, number, part, monkeypatch)
    result = cli(command, run.root)
    assert result.code == ExitCode.PERMISSION
    assert f"cannot be read or written: {run.root}/{part} (found {os.strerror(number)}); " in result.error


@pytest.mark.parametrize(
    ("call", "number", "code"),
    [
        ("write", errno.ENOSPC, ExitCode.NO_ROOM),
        ("write", errno.EDQUOT, ExitCode.NO_ROOM),
        ("fsync", errno.EDQUOT, ExitCode.NO_ROOM),
        ("fsync", errno.EIO, ExitCode.PERMISSION),
    ],
)
@pytest.mark.parametrize("model", ["model", "builtin:tiny"])
def test_storage_that_takes_no_run_is_one_line_with_the_path(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: int, model: str
) -> None:
    fail_storage(call, number, f"{workplace}/runs", monkeypatch)
    result = cli("submit", "config.yaml", f"model.path={model}", "--cluster", "local")
    assert result.code == code, result.err
    said = result.err.splitlines()[-1]  # the first run on a machine says before that it builds the model
    assert f": {workplace}/runs" in said
    assert os.strerror(number) in said


def test_an_error_of_storage_that_names_no_path_is_one_line_and_another_keeps_its_traceback(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "statvfs", fails)
    words = ("submit", "config.yaml", "--cluster", "local")
    number = errno.EREMOTEIO
    result = cli(*words)
    assert (result.code, os.strerror(number) in result.error) == (ExitCode.PERMISSION, True)
    number = errno.EINVAL
    with pytest.raises(OSError, match=os.strerror(number)):
        cli(*words)
