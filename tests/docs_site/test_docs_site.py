"""The site: every page is in its navigation once, what they link to comes along, and what is dead is found."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.docs_site import links
from tests.docs_site.links import Answer, outside, problems
from tests.docs_site.pages import linked, stage

ROOT = Path(__file__).parents[2]


def _pages(part: Any) -> list[str]:
    """The pages of a navigation, in their order."""
    if isinstance(part, str):
        return [part]
    inner = part.values() if isinstance(part, dict) else part
    return [page for each in inner for page in _pages(each)]


NAVIGATION = _pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])


def test_each_page_is_in_the_navigation_once() -> None:
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert sorted(NAVIGATION) == sorted(set(NAVIGATION))
    assert pages - set(NAVIGATION) == set()


def test_what_the_navigation_names_is_staged() -> None:
    staged = {str(path.relative_to(ROOT)) for path in linked(ROOT)}
    assert set(NAVIGATION) - staged == set()


def test_a_file_that_a_page_links_to_is_staged_under_its_name(tmp_path: Path) -> None:
    root, place = tmp_path / "root", tmp_path / "place"
    (root / "docs").mkdir(parents=True)
    (root / "configs").mkdir()
    (root / "README.md").write_text(
        "[a](docs/./a.md#x) and [out](https://example.org/) and [gone](gone.md)\n"
    )
    (root / "docs" / "a.md").write_text(
        "[p](../configs/p.py) [outside](../../secret)\n```\n[c](../configs/c.py)\n```\n"
    )
    for name in ("p.py", "c.py", "q.py"):
        (root / "configs" / name).write_text(name)
    (tmp_path / "secret").write_text("no")
    stage(root, place)
    assert (place / "configs/p.py").read_text() == "p.py"
    assert {path.name for path in place.rglob("*.*")} >= {"README.md", "a.md", "p.py", "iframe-worker.js"}
    assert not {path.name for path in place.rglob("*")} & {"c.py", "q.py", "secret"}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="docs/a.html#there">a</a><a href="docs">d</a><h1 id="top">t</h1>'
    )
    (tmp_path / "docs/index.html").write_text(
        '<a href="../index.html#top">up</a><a href="#own" id="own">x</a>'
    )
    (tmp_path / "docs/a.html").write_text(
        '<h2 id="there">h</h2><img src="p.svg"><a href="https://example.org/#x">'
    )
    (tmp_path / "docs/p.svg").write_text("<svg/>")
    return tmp_path


def test_a_whole_site_has_no_problem(site: Path) -> None:
    assert problems(site) == []


@pytest.mark.parametrize(
    ("html", "said"),
    [
        ('<a href="gone.html">', "no file for gone.html"),
        ('<a href="a.html#nowhere">', "no anchor for a.html#nowhere"),
        ('<a href="#nowhere">', "no anchor for #nowhere"),
        ('<img src="gone.svg">', "no file for gone.svg"),
        ('<link rel="stylesheet" href="gone.css">', "no file for gone.css"),
        ('<script src="https://cdn.example.org/x.js"></script>', "loads https://cdn.example.org/x.js"),
        ('<link rel="stylesheet" href="//fonts.example.org/x">', "loads //fonts.example.org/x"),
    ],
)
def test_a_dead_link_and_a_file_of_the_network_are_found(site: Path, html: str, said: str) -> None:
    (site / "docs/b.html").write_text(html)
    assert problems(site) == [f"docs/b.html: {said}"]


@pytest.mark.parametrize(
    ("code", "result", "said"),
    [
        (200, 0, "links to the outside: 1, gone: 0"),
        (404, 1, "404 https://example.org/"),
        (403, 0, "403 https://example.org/"),
        (0, 0, "NOT RUN: no network"),
    ],
)
def test_links_to_the_outside_are_errors_if_they_are_gone(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    result: int,
    said: str,
) -> None:
    assert outside(site) == ["https://example.org/"]
    monkeypatch.setattr(links, "SITE", site)
    monkeypatch.setattr(links, "_ask", lambda link: Answer(link, code, ""))
    assert links.main() == result
    assert said in capsys.readouterr().out
