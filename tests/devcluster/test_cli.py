"""`verl-slurm devcluster`, as far as it needs no cluster; the rest is behind the functions it calls."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from verl_slurm.base.errors import ConfigError, NotFound
from verl_slurm.base.processes import boot_id
from verl_slurm.cli.setup.devcluster import devcluster as command
from verl_slurm.slurm.devcluster.conf import ClusterOptions
from verl_slurm.slurm.devcluster.state import ClusterState, write_state

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
    assert "..." not in text.partition("Commands:")[2], "no sentence is cut off"
    assert "until all nodes are idle (a second or two)." in " ".join(text.split())


def test_env_is_fit_for_eval(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["env", "--dir", str(tmp_path / "it's")])
    assert done.output == f"export SLURM_CONF='{tmp_path}/it'\"'\"'s/slurm.conf'\n"


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
    status = CliRunner().invoke(command, ["status", "--json", "--dir", str(tmp_path)])
    assert json.loads(status.output)["running"] is False
    assert "devcluster start" in str(done.exception)


def test_a_command_means_the_cluster_of_its_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meant(*words: str) -> str:
        return CliRunner().invoke(command, ["env", *words]).output

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VERL_SLURM_DEVCLUSTER", raising=False)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert str(tmp_path / "cache") in meant(), "a site's cluster is none of ours"
    started = ClusterState(boot_id=boot_id(), name="dev", slurm_version="22.05.8", options=ClusterOptions())
    write_state(tmp_path, started)
    assert f"SLURM_CONF={tmp_path}/slurm.conf" in meant()
    assert f"SLURM_CONF={tmp_path}/other/slurm.conf" in meant("--dir", f"{tmp_path}/other")
