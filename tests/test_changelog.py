"""A fragment of changelog.d is plain text of a line or two, in a file whose name says what it is about."""

import re
from pathlib import Path

import pytest

PLACE = Path(__file__).parent.parent / "changelog.d"
FILES = sorted(path for path in PLACE.iterdir() if path.name != "README.md")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_fragment_is_plain_and_its_name_has_lower_case_and_hyphens(path: Path) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*\.md", path.name)
    text = path.read_text()
    assert text.strip()
    assert text == text.strip() + "\n"
    assert re.match(r"[A-Z`]", text), "a heading or a list has no place in it"
    assert len(text) <= 600
    assert "\n\n" not in text
