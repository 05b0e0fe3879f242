"""Values that readers take differently, or not at all: in the configuration, on the command line, in our files."""

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest

from tests.builders import write_config
from tests.cli.conftest import (
    Cli,
    cli as cli,  # a fixture
)
from verl_slurm.base.errors import CheckpointCorrupt, ConfigError, VerlSlurmError, WireError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import read_owner
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.manifest import parse as parse_manifest
from verl_slurm.cli.command_options import Number, Whole
from verl_slurm.cli.main import COMMANDS, cli as group
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import RunConfig

NUMBERS = {
    "NaN": "NaN",
    "nan of YAML": ".nan",
    "Infinity": "Infinity",
    "infinity of YAML": "-.inf",
    "overflow": "1e5000",
    "negative": "-1",
    "2^63": str(2**63),
    "2^64": str(2**64),
    "10^4301": "1" + "0" * 4301,
    "10^100000": "1" + "0" * 100_000,
    "Arabic digits": "١٢",
    "full-width digits": "１２",
    "underscore": "1_000",
    "True": "True",
    "true": "true",
    "hexadecimal": "0x10",
    "sexagesimal": "1:30",
    "two signs": "--5",
    "blanks": "5 5",
    "empty": "",
}
named = pytest.mark.parametrize("text", NUMBERS.values(), ids=NUMBERS.keys())


@pytest.mark.scenario("M10")
@named
@pytest.mark.parametrize("way", ["file", "override"])
@pytest.mark.parametrize(
    "key", ["train.steps", "train.actor_lr", "checkpoint.every_steps", "daemon.save_margin_s"]
)
def test_a_number_of_the_configuration_is_one_by_everybody_s_reading(key: str, way: str, text: str) -> None:
    section, leaf = key.split(".")
    files = f"{section}:\n  {leaf}: {text}\n", ""
    with pytest.raises(ConfigError) as refused:
        if way == "file":
            parse_config(files[0].encode(), "my.yaml")
        else:
            parse_config(b"", "my.yaml", [f"{key}={text}"])
    assert len(refused.value.one_line()) < 5000, "a megabyte of digits is not repeated"


def numeric_options() -> list[tuple[str, str]]:
    """(command, option) of all that take a number."""
    found = []
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        options = [option for option in command.params if isinstance(option, click.Option)]
        found += [(name, option.opts[0]) for option in options if isinstance(option.type, Whole | Number)]
    return found


@pytest.mark.scenario("M10")
@named
def test_a_number_on_the_command_line_is_one_by_everybody_s_reading(cli: Cli, text: str) -> None:
    options = numeric_options()
    assert len(options) >= 8
    for name, option in options:
        done = cli(name, option, text)
        assert done.code == ExitCode.USAGE, (name, option)
        assert "Traceback" not in done.err
        assert option in done.err, (name, option, done.err)


@pytest.mark.scenario("M10")
def test_no_option_takes_python_s_idea_of_a_number() -> None:
    """`click.INT` takes `1_000`, and `click.FLOAT` takes `nan`. The development cluster may: it is not for users."""
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if name == "devcluster":
            continue
        for option in command.params:
            kind = type(option.type)
            assert kind not in (click.IntRange, click.FloatRange, type(click.INT), type(click.FLOAT)), (
                name,
                option.name,
            )


ATTEMPT = {"attempt": 1, "cluster": "local", "job_id": "1", "restart": 0, "host": "h", "pid": 1, "taken": ""}


@pytest.mark.scenario("M10")
@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "1e5000", "true", '"1"', "1.5", "null", str(2**64), "١", "1_000", "01"]
)
def test_a_number_in_a_file_of_ours_is_one_or_the_file_is_refused(value: str, tmp_path: Path) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    text = json.dumps(ATTEMPT | {"attempt": "HERE"}).replace('"HERE"', value)
    write_file(paths.attempt, text.encode())
    with pytest.raises(CheckpointCorrupt):
        read_owner(paths)
    from verl_slurm.wire.lead_file import read_lead_address

    private_dir(paths.control)
    address = {"attempt": 1, "restart": 1, "host": "h", "port": "HERE", "token": "0" * 64}
    write_file(paths.lead_address, json.dumps(address).replace('"HERE"', value).encode())
    with pytest.raises(WireError):
        read_lead_address(paths)
    with pytest.raises(VerlSlurmError):
        parse_manifest(f'{{"step": {value}}}'.encode(), where="x")


@pytest.mark.scenario("M10")
@pytest.mark.parametrize("job_id", ["-1", "١", "1_000", "0x1", "", "9" * 5000, "NaN", "\x1b[31m", "1\n2"])
@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_a_job_number_that_is_none_is_not_asked_about(
    job_id: str, cluster: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    paths = RunPaths(private_dir(tmp_path / "run"))
    write_config(paths, name="demo")
    told = {"time": "", "event": "submitted", "job_id": job_id, "cluster": cluster, "host": ""}
    paths.events.write_bytes(msgspec.json.encode(told) + b"\n")
    for words in (("status",), ("cancel",), ("requeue",)):
        done = cli(*words, paths.root)
        assert "Traceback" not in done.err
        if words != ("status",):
            assert done.code != 0
        assert not set("\x1b\x00") & set(done.out + done.err)


# ---- M09


def bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines)


HOSTILE = {
    "alias bomb": bomb(),
    "alias of nothing": "name: demo\nrun_dir: *n\n",
    "alias of what it is in": "name: &n [*n]\n",
    "merge key twice": "train:\n  <<: {steps: 3}\n  <<: {steps: 3}\n",
    "merge of a word": "train:\n  <<: steps\n",
    "merge of an alias in an unknown section": "x: &x {steps: 3}\ntrain:\n  <<: *x\n",
    "python object": "name: !!python/object/apply:os.system ['touch owned']\n",
    "python name": "name: !!python/name:os.system\n",
    "binary": "name: !!binary aGk=\n",
    "set": "name: !!set {a, b}\n",
    "own tag": "name: !x demo\n",
    "scalar of a megabyte": "name: " + "x" * (1 << 20) + "\n",
    "comment of a megabyte": "# " + "x" * (1 << 20) + "\n",
    "key of a megabyte": "x" * (1 << 20) + ": 1\n",
    "duplicate key": "seed: 1\nseed: 2\n",
    "duplicate key in flow": "train: {steps: 1, steps: 2}\n",
    "duplicate key, quoted": "seed: 1\n'seed': 2\n",
    "duplicate section": "train:\n  steps: 1\ntrain:\n  ppo_epochs: 1\n",
    "deep": "[" * 5000,
    "two documents": "seed: 1\n---\nseed: 2\n",
    "no for false": "deterministic: no\n",
    "on for true": "deterministic: on\n",
    "yes for true": "deterministic: yes\n",
    "octal": "seed: 017\n",
    "sexagesimal": "seed: 1:30\n",
    "date for text that is checked": "seed: 2026-01-01\n",
    "null key": "null: 1\n",
    "number for a key": "1: 2\n",
    "list for a key": "? [a]\n: 1\n",
    "UTF-16": "seed: 1\n".encode("utf-16").decode("latin-1"),
    "NUL": "seed: 1\x00\n",
    "line separator in a key": "se\u2028ed: 1\n",
}


@pytest.mark.scenario("M09")
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_configuration_is_the_plain_part_of_yaml_and_small(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ConfigError) as refused:
        parse_config(text.encode(), "my.yaml")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100 << 10, f"{grown} KiB"
    assert time.process_time() - began < 20, "it is refused, not worked off"
    assert len(refused.value.one_line()) < 5000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.scenario("M09")
@pytest.mark.parametrize("key", ["name", "slurm.account", "model.path"])
@pytest.mark.parametrize("value", ["no", "017", "1:30", "1e3", "null_", "2026-01-01", "0x10", "=", "<<"])
def test_text_is_what_stands_there(key: str, value: str) -> None:
    """What another reader would make a boolean, a number or a date of."""
    try:
        config = parse_config(b"", "my.yaml", [f"{key}={value}"])
    except ConfigError:
        return  # refused for what it is, not turned into something else
    found: object = config
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_the_cases_are_refused_for_their_own_sake() -> None:
    """Each differs from a configuration that is taken by the one thing that its name says."""
    good: Callable[[str], RunConfig] = lambda text: parse_config(text.encode(), "my.yaml")  # noqa: E731
    assert good("name: demo\nrun_dir: demo\n").name == "demo"
    assert good("train:\n  steps: 3\n").train.steps == 3
    assert good("deterministic: false\n").deterministic is False
    assert good("seed: 17\n# " + "x" * 1000).seed == 17
    assert good("train:\n  actor_lr: 1e-4\n  steps: 12\n").train.actor_lr == 1e-4
