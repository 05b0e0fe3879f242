"""The environment that an agent makes for its ranks, with a real bash."""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from verl_slurm_daemon.agent.rank_environment import prepare_environment

from tests.harness import wait_until_gone
from verl_slurm.base.errors import NOT_SET_UP, ConfigError, PermissionRefused
from verl_slurm.config.schema import DaemonConfig, RunConfig, SlurmConfig

NODE = {"PATH": "/usr/bin:/bin", "HOME": "/root", "NODE": "its own", "A": "node"}


def made(log: Path, *setup: str, **keys: Any) -> dict[str, str]:
    config = msgspec.structs.replace(RunConfig(), slurm=SlurmConfig(setup=setup), **keys)
    return asyncio.run(prepare_environment(config, NODE, log))


def test_variables_win_over_commands_and_those_over_the_node_and_any_value_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert made(log) == NODE
    assert not log.exists()
    found = made(tmp_path / "log", "export A=command B=command", env={"B": "key", "N": 3})
    assert found == NODE | {"A": "command", "B": "key", "N": "3"}
    long = "x" * 100_000
    found = made(tmp_path / "log", f"export LONG={long}", r"export ODD=$'a=b\nc \xff'", "set -- 9; exec 3>&-")
    assert found["LONG"] == long
    assert os.fsencode(found["ODD"]) == b"a=b\nc \xff"
    assert made(tmp_path / "log", "export PATH=/nowhere")["PATH"] == "/nowhere"


def test_what_commands_say_is_in_the_ranks_log_and_a_failure_names_the_command(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(
        ConfigError, match=r"slurm.setup\[1\] failed with exit code 3: loading / bash says so"
    ) as caught:
        made(log, "echo loading", "echo bash says so >&2; (exit 3)")
    assert str(log) in caught.value.one_line()
    assert log.read_text().startswith("loading\n")
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_shell_without_condas_hook_is_told_of_the_key_that_needs_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"conda: command not found.*slurm.python=NAME"):
        made(tmp_path / "log", "conda activate mine")


@pytest.mark.parametrize("busy", [False, True], ids=["in a command", "before bash is known"])
def test_a_command_that_hangs_is_named_before_the_lead_gives_the_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    start = asyncio.create_subprocess_exec

    async def slowly(*words: str, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*words, **options)
        await asyncio.sleep(0.6)  # as on a node that is busy
        return process

    if busy:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    with pytest.raises(ConfigError, match=rf"{NOT_SET_UP}: .*slurm.setup \(found no end after"):
        made(tmp_path / "log", "sleep 61.5 & wait", daemon=DaemonConfig(start_timeout_s=0.5))
    wait_until_gone("61.5")


def test_a_secret_comes_from_its_file_at_each_start_and_stands_nowhere_else(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("sesame\n")
    secret.chmod(0o600)
    log = tmp_path / "log"
    assert made(log, "env", env_from_files={"API_KEY": str(secret)})["API_KEY"] == "sesame"
    assert "sesame" not in log.read_text()
    secret.write_text("changed")
    assert made(log, env_from_files={"API_KEY": str(secret)})["API_KEY"] == "changed"


def test_a_secret_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("sesame")
    secret.chmod(0o644)
    with pytest.raises(PermissionRefused):
        made(tmp_path / "log", env_from_files={"API_KEY": str(secret)})


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_a_secret_that_is_not_there_ends_the_start(tmp_path: Path, content: str | None) -> None:
    secret = tmp_path / "key"
    if content is not None:
        secret.write_text(content)
        secret.chmod(0o600)
    with pytest.raises(ConfigError, match="API_KEY") as caught:
        made(tmp_path / "log", env_from_files={"API_KEY": str(secret)})
    # In a run that has trained the first is the node's fault; what is written wrongly stays the user's.
    assert (NOT_SET_UP in str(caught.value)) is (content is None)
