"""docs/export.md stays true: its commands exist with their options, and its table has the files of the code."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from verl_slurm.cli.main import COMMANDS, cli

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
LINES = [line[2:] for line in PAGE.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_page_is_understood(line: str) -> None:
    program, name, *words = shlex.split(line)
    assert (program, name in COMMANDS) == ("verl-slurm", True)
    assert {line.split()[1] for line in LINES} == {"inspect", "export"}
    help_text = CliRunner().invoke(cli, [name, "--help"]).output
    assert [w for w in words if w.startswith("--") and w not in help_text] == []


@pytest.mark.torch
def test_the_table_names_the_files_of_the_layouts() -> None:
    from verl_slurm.export.layouts import FILES

    for layout, files in FILES.items():
        (row,) = re.findall(rf"^\| `{layout}` \| (.*) \|$", PAGE, re.MULTILINE)
        assert re.findall(r"`([^`]+)`", row) == list(files.values())
