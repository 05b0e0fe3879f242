"""`verl-slurm init --key`, and what `submit` says of keys."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_slurm.base.exit_codes import ExitCode

Cli = Callable[..., Any]
HEX = bytes(range(200, 232)).hex()


def test_a_key_is_made_once_and_named_by_its_id(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    made = cli("init", "--key", path)
    assert made.code == ExitCode.OK
    assert path.stat().st_mode & 0o777 == 0o600
    content = path.read_text()
    assert content.strip() not in made.out
    again = cli("init", "--key", path)
    assert again.out == made.out.replace("\n", ", which is there already\n")
    assert path.read_text() == content
    assert cli("init", "my.yaml", "--key", path).code == ExitCode.USAGE


@pytest.mark.scenario("M08")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("checkpoint.encryption.key_file=/nowhere/run.key", ExitCode.KEY),
        ("checkpoint.encryption.key_env=NOT_SET_ANYWHERE", ExitCode.KEY),
        (f"checkpoint.encryption.key_file={HEX}", ExitCode.CONFIG),
        (f"checkpoint.encryption.key_env={HEX}", ExitCode.CONFIG),
        (f"checkpoint.encryption={{key: {HEX}}}", ExitCode.CONFIG),
        (f"checkpoint.encryption.key={HEX}", ExitCode.CONFIG),
        (f"checkpoint.encryption={HEX}", ExitCode.CONFIG),
        (f"checkpoint.encryption={{key_file: /a, key_env: {HEX}}}", ExitCode.CONFIG),
    ],
)
def test_submit_refuses_a_key_that_is_not_there_and_never_shows_one(
    workplace: Path, cli: Cli, word: str, code: ExitCode
) -> None:
    result = cli("submit", "config.yaml", word, "--cluster", "local")
    assert result.code == code
    assert result.errors
    assert HEX[:8] not in result.err


@pytest.mark.scenario("M08")
def test_a_dry_run_checks_the_key_and_never_shows_it(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_KEY", HEX)
    word = "checkpoint.encryption.key_env=RUN_KEY"
    result = cli("submit", "config.yaml", word, "--cluster", "local", "--dry-run")
    assert result.code == ExitCode.OK
    assert "key" in result.out
    assert HEX[:8] not in result.out + result.err
