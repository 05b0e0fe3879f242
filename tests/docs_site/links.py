"""Looks for dead links in a site that was built: `python -m tests.docs_site.links` also tries those to the outside.

zensical's own check (0.0.73) sees links between pages and their anchors, and neither pictures nor other files. It also
does not see what a page loads from the network.
"""

import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).parents[2] / "site"
_TIMEOUT_S = 15
_GONE = (404, 410)
_LOADED = {"img", "script", "iframe", "source", "video", "audio"}


class _Page(HTMLParser):
    """The anchors of a page, and what it links to and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := of.get(name))}
        if tag == "a" and (link := of.get("href")):
            self.links.append(link)
        elif tag == "link" and of.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.append(of.get("href") or "")
        elif tag in _LOADED and (link := of.get("src")):
            self.loads.append(link)


class Answer(NamedTuple):
    """How a server answered."""

    link: str
    code: int
    """0: no answer."""
    words: str


def problems(site: Path) -> list[str]:
    """Returns a line for each link that leads nowhere, and for each file that a page would load from the network."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        # Links of the page of an unknown address go by the root of a server.
        if path.name == "404.html":
            continue
        name = path.relative_to(site)
        found += [f"{name}: loads {link}" for link in page.loads if urlsplit(link).netloc]
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{name}: no file for {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: no anchor for {link}")
    return found


def outside(site: Path) -> list[str]:
    """Lists the addresses that the pages link to, each once."""
    links = {link for path in site.rglob("*.html") for link in _Page(path.read_text()).links}
    return sorted({link.partition("#")[0] for link in links if link.startswith(("http://", "https://"))})


def _ask(link: str) -> Answer:
    asked = urllib.request.Request(link, headers={"User-Agent": "Mozilla/5.0 (a check of links)"})
    try:
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:
            return Answer(link, answer.status, "")
    except urllib.error.HTTPError as error:
        return Answer(link, error.code, error.reason)
    except (OSError, ValueError) as error:
        return Answer(link, 0, str(error))


def main() -> int:
    """Tries every address that the pages link to.

    Returns:
        1 if a server says that one is gone. No answer, or a refusal of a program, is told and no error.
    """
    links = outside(SITE)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(_ask, links))
    if links and not any(answer.code for answer in answers):
        print(f"links to the outside: NOT RUN: no network ({len(links)} addresses)")
        return 0
    for answer in answers:
        if not 200 <= answer.code < 300:
            print(f"{answer.code or 'no answer'} {answer.link} {answer.words}")
    gone = [answer for answer in answers if answer.code in _GONE]
    print(f"links to the outside: {len(links)}, gone: {len(gone)}")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
