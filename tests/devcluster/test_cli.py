"""`verl-slurm devcluster`, as far as it needs no cluster; the rest is behind the functions it calls."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from verl_slurm.base.errors import ConfigError, NotFound
from verl_slurm.cli.setup.devcluster import devcluster as command

COMMANDS = ("start", "stop", "status", "preempt", "fail-node", "env")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    done = CliRunner().invoke(command, [name, "--help"])
    assert done.exit_code == 0
    assert "--json" in done.output
    assert len(done.output.split("\n\n")[1].strip()) > 30


def test_the_help_shows_a_whole_session() -> None:
    text = CliRunner().invoke(command, ["--help"]).output
    for name in COMMANDS:
        assert name in text
    assert 'eval "$(verl-slurm devcluster env)"' in text


def test_env_is_fit_for_eval(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["env", "--dir", str(tmp_path / "it's")])
    assert done.output == f"export SLURM_CONF='{tmp_path}/it'\"'\"'s/slurm.conf'\n"


def test_status_of_nothing_is_an_answer(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["status", "--json", "--dir", str(tmp_path)])
    assert json.loads(done.output)["running"] is False


@pytest.mark.parametrize(
    "words", [("--nodes", "99"), ("--cpus", "0"), ("--mem-mb", "63"), ("--gpus", "17"), ("--grace", "-1")]
)
def test_an_option_out_of_range_is_a_config_error(words: tuple[str, str], tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["start", *words, "--dir", str(tmp_path / "c")])
    assert isinstance(done.exception, ConfigError)
    assert "devcluster start --help" in done.exception.one_line()
    assert not (tmp_path / "c").exists()


def test_without_a_cluster_the_remedy_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["preempt", "1", "--dir", str(tmp_path)])
    assert isinstance(done.exception, NotFound)
    assert "devcluster start" in str(done.exception)
