"""What `devcluster --help` says of its commands, and which cluster they mean."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from verl_slurm.base.processes import boot_id
from verl_slurm.cli.main import cli
from verl_slurm.devcluster.conf import ClusterOptions
from verl_slurm.devcluster.state import ClusterState, write_state


def test_the_list_of_commands_is_not_cut_off() -> None:
    text = CliRunner().invoke(cli, ["devcluster", "--help"]).output
    assert "..." not in text.partition("Commands:")[2]
    assert "until all nodes are idle (a second or two;" in " ".join(text.split())


def test_a_command_means_the_cluster_of_its_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meant(*words: str) -> str:
        return CliRunner().invoke(cli, ["devcluster", "env", *words]).output

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VERL_SLURM_DEVCLUSTER", raising=False)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert str(tmp_path / "cache") in meant(), "a site's cluster is none of ours"
    started = ClusterState(boot_id=boot_id(), name="dev", slurm_version="22.05.8", options=ClusterOptions())
    write_state(tmp_path, started)
    assert f"SLURM_CONF={tmp_path}/slurm.conf" in meant()
    assert f"SLURM_CONF={tmp_path}/other/slurm.conf" in meant("--dir", f"{tmp_path}/other")
