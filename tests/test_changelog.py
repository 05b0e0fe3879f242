"""A fragment of changelog.d is plain text of a line or two, in a file whose name says what it is about."""

import re
from pathlib import Path

PLACE = Path(__file__).parent.parent / "changelog.d"


def _is_plain(text: str) -> bool:
    """A heading or a list has no place in it."""
    whole = text.strip() and text == text.strip() + "\n"
    return bool(whole and re.match(r"[A-Z`]", text) and len(text) <= 600 and "\n\n" not in text)


def test_a_fragment_is_plain_and_its_name_has_lower_case_and_hyphens() -> None:
    fragments = [path for path in PLACE.iterdir() if path.name != "README.md"]
    assert [
        path.name for path in fragments if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*\.md", path.name)
    ] == []
    assert [path.name for path in fragments if not _is_plain(path.read_text())] == []
