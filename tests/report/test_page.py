"""The text of the page: what it allows itself, how large it is, and what becomes of text from outside."""

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.interrupted_runs import HOSTILE, HOSTILE_NAME, make_interrupted_run
from verl_slurm.report.gather import gather
from verl_slurm.report.page import render_page


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("runs")
    runs = [make_interrupted_run(root / name, 12, text=HOSTILE) for name in ("one", HOSTILE_NAME)]
    return render_page(gather(runs))


class _Attributes(HTMLParser):
    """The names of all attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {name for name, _ in attrs}


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page_allows_its_own_scripts_and_style_and_nothing_else(hostile: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', hostile)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].replace("&#39;", "'").split("; "))
    scripts = re.findall(r"<script>(.*?)</script>", hostile, re.DOTALL)
    assert rules["script-src"].split() == [_digest(script) for script in scripts]
    assert rules["style-src"] == _digest(hostile.split("<style>")[1].split("</style>")[0])
    assert {rules[name] for name in ("default-src", "base-uri", "form-action")} == {"'none'"}
    assert len(rules) == 5
    attributes = _Attributes(hostile).found
    assert {"id", "class", "aria-label"} <= attributes
    assert not {name for name in attributes if name == "style" or name.startswith("on")}


def test_text_from_outside_is_no_markup_and_has_no_invisible_character(hostile: str) -> None:
    assert hostile.count("<script") == 3
    assert "<img" not in hostile
    assert "49" not in re.findall(r"\$7\*7|\{\{ 7\*7 \}\}", hostile), "templates are not evaluated twice"
    # ECharts has some of these characters in strings of its own.
    ours = hostile.split("<script>")[0]
    assert not [c for c in ours if not c.isprintable() and c != "\n"]
    assert "\\u202e" in ours
    data = json.loads(ours.split('id="charts">')[1].split("</script>")[0])
    assert data["names"] == ["one", HOSTILE_NAME]


def test_200_interruptions_take_less_than_2_mb(tmp_path: Path) -> None:
    report = gather([make_interrupted_run(tmp_path / "run", 200)])
    assert report.runs[0].interruptions["count"] == 200
    page = render_page(report)
    assert len(page.encode()) < 2_000_000
    assert page.count("SIGTERM to lead") + page.count("does not answer") > 100


def test_a_directory_whose_name_is_no_utf_8_has_a_page(tmp_path: Path) -> None:
    run = make_interrupted_run(tmp_path / os.fsdecode(b"r\xffn"), 0)
    run.run_yaml.unlink()
    page = render_page(gather([run]))
    assert page.encode()
    assert "r\\udcffn" in page


def test_a_page_of_several_runs_says_what_was_not_compared(tmp_path: Path) -> None:
    runs = [make_interrupted_run(tmp_path / name, 0) for name in ("one", "two")]
    assert "names and places apart, they are the same" in render_page(gather(runs))
    runs[1].run_yaml.unlink()
    assert "the configuration cannot be read: two" in render_page(gather(runs))
