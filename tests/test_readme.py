"""The README is what a newcomer reads first: short, its commands at the top, its figures those of docs/figures.md.

Its commands, configurations and links are held to the code by tests/test_docs.py, with those of every other page.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _rows(text: str) -> dict[str, list[str]]:
    """The first cell of each line of a table with three columns → the other two."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in rows if len(cells) == 3}


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 150


def test_the_first_40_lines_show_how_to_try_it_and_how_to_use_it() -> None:
    commands = [line[2:] for line in README.splitlines()[:40] if line.startswith("$ ")]
    assert [" ".join(command.split()[:2]) for command in commands] == [
        "make demo",
        "make test",
        "pip install",
        "verl-slurm init",
        "verl-slurm submit",
    ]


def test_the_figures_are_those_of_the_page_of_all_figures() -> None:
    all_of_them = _rows((ROOT / "docs/figures.md").read_text())
    mine = {what: cells for what, cells in _rows(README).items() if what not in ("what", "---")}
    assert len(mine) == 5
    for what, (figure, command) in mine.items():
        full_figure, full_command = all_of_them[what]
        assert full_figure.startswith(figure), what
        assert full_command.startswith(command), what


def test_the_readme_names_the_license() -> None:
    assert re.search(r"\[Apache-2\.0\]\(LICENSE\)", README)
