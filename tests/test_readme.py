"""The README stays true: its commands exist, its configuration loads, its table is the code's."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from verl_slurm.cli.main import COMMANDS, cli
from verl_slurm.config.load import parse_config
from verl_slurm.exit_codes import ExitCode

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)


def _commands() -> list[str]:
    lines = [line[2:] for block in _blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    return [line.split("  #")[0].strip() for line in lines]


def test_there_is_something_to_check() -> None:
    assert len(_commands()) > 8
    assert _blocks("yaml")


@pytest.mark.parametrize("command", [c for c in _commands() if c.startswith("verl-slurm")])
def test_a_command_of_the_readme_is_understood(command: str) -> None:
    words = shlex.split(command)[1:]
    assert words[0] in COMMANDS
    options = [word for word in words[1:] if word.startswith("--")]
    help_text = CliRunner().invoke(cli, [words[0], "--help"]).output
    for option in options:
        assert option in help_text, f"{words[0]} has no {option}"


@pytest.mark.parametrize("command", [c for c in _commands() if c.startswith("make")])
def test_a_make_target_of_the_readme_exists(command: str) -> None:
    target = shlex.split(command)[1]
    assert re.search(rf"^{target}:.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("block", _blocks("yaml"))
def test_a_configuration_of_the_readme_loads(block: str) -> None:
    parse_config(block.encode(), "README.md")


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/*.yaml")), ids=lambda p: p.name)
def test_a_configuration_that_ships_loads(path: Path) -> None:
    parse_config(path.read_bytes(), str(path))


def test_the_table_of_exit_codes_is_the_codes() -> None:
    table = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", README, re.MULTILINE))
    assert table == {str(int(code)): code.description for code in ExitCode}


def test_files_that_the_readme_names_are_there() -> None:
    named = re.findall(
        r"`((?:verl_slurm|daemon|sbatch|configs|benchmarks|docs|tests|constraints)/[\w./-]+)`", README
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
