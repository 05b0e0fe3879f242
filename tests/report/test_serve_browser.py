"""The live pages in a real browser: a thousand runs, hostile text, both widths, and a page that follows its run.

VERL_SLURM_SCREENSHOTS=DIR keeps serve-wide.png and serve-narrow.png, as in test_browser.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.interrupted_runs import HOSTILE, HOSTILE_NAME, make_interrupted_run
from tests.journals import append_event
from tests.many_runs import make_run
from tests.report.conftest import WIDTHS, Opened
from verl_slurm.base.paths import RunPaths

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NUMBER = 1000
LIVE = "body[data-live]"
DRAWN = "body[data-live]:has(.chart svg path)"


@contextmanager
def served(place: Path) -> Iterator[str]:
    """The command itself; yields the printed address."""
    command = [sys.executable, "-P", "-m", "verl_slurm.cli", "serve", str(place), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["listening"]
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    kinds = ("running", "done", "done", "cancelled", "failed", "queued")
    for number in range(NUMBER - 2):
        name, kind = f"grpo-{number:04d}", kinds[number % len(kinds)]
        make_run(place / name, kind, cluster="local", num_events=16, num_checkpoints=0)
    make_interrupted_run(place / HOSTILE_NAME, 3, text=HOSTILE)
    append_event(RunPaths(place / HOSTILE_NAME), "warning", topic=HOSTILE, text=HOSTILE)
    make_interrupted_run(place / "a-real-one", 3)
    return place


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    with served(place) as printed:
        yield printed


class Visit(Opened):
    """A page of the server, with what it asked of others."""

    READY = f"document.querySelector({LIVE!r})"

    @property
    def elsewhere(self) -> list[str]:
        origin = "/".join(self.page.url.split("/")[:3])
        return [url for url in self.requests if not url.startswith(origin + "/")]


@pytest.mark.parametrize("name", WIDTHS)
def test_a_thousand_runs_fit_the_window_and_are_found(name: str, browser: Any, address: str) -> None:
    with Visit(browser, address, WIDTHS[name]) as visit:
        page = visit.page
        assert page.evaluate("document.querySelector('tbody').rows.length") == NUMBER
        assert page.evaluate("document.documentElement.scrollWidth") == WIDTHS[name]
        assert "token" not in page.url
        if folder := os.environ.get("VERL_SLURM_SCREENSHOTS"):
            page.get_by_label("Show those with").fill("grpo")
            page.evaluate("document.querySelector('.sub').textContent = '/home/me/runs'")
            page.screenshot(path=Path(folder) / f"serve-{name}.png")
        page.get_by_label("Show those with").fill("GRPO-0004")
        assert page.evaluate("[...document.querySelector('tbody').rows].filter(r => !r.hidden).length") == 1
        assert (visit.said, visit.elsewhere) == ([], [])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_the_live_pages(scheme: Any, browser: Any, address: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    # The page's policy allows no script but its own, and axe is one.
    with Visit(browser, address, color_scheme=scheme, bypass_csp=True) as visit:
        # axe looks at each cell, for half a minute if there are seven thousand.
        visit.page.get_by_label("Show those with").fill("-000")
        for path in ("", "run/a-real-one"):
            if path:
                visit.page.goto(visit.page.url + path)
                visit.page.wait_for_selector(DRAWN)
            found = axe.Axe().run(visit.page).response["violations"]
            assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []


def test_hostile_text_does_no_harm_in_the_live_pages(browser: Any, address: str, place: Path) -> None:
    with Visit(browser, address) as visit:
        page = visit.page
        # Once by the server's HTML, once by the script: the row is replaced after an event.
        append_event(RunPaths(place / HOSTILE_NAME), "warning", topic="new", text="new" + HOSTILE)
        row = page.locator("tr", has_text=HOSTILE_NAME)
        row.get_by_text("new</script>").wait_for()
        assert page.query_selector_all("main img, main b, main svg, main script") == []
        row.get_by_role("link").click()
        page.wait_for_selector(DRAWN)
        assert "</script><script>window.harmed=1</script>" in page.inner_text("main")
        assert page.query_selector_all("main img, main b, main svg[onload], main script") == []
        assert page.evaluate("window.harmed") is None
        assert (visit.said, visit.elsewhere) == ([], [])


def test_the_page_follows_its_run_and_keeps_what_was_opened(browser: Any, address: str, place: Path) -> None:
    with Visit(browser, address) as visit:
        page = visit.page
        page.get_by_role("link", name="a-real-one").click()
        page.wait_for_selector(DRAWN)
        page.click("summary")
        append_event(RunPaths(place / "a-real-one"), "warning", topic="late", text="a late warning")
        # It was touched a moment ago, so it asks first.
        page.get_by_role("button", name="Show").click()
        page.get_by_text("a late warning").wait_for()
        assert page.evaluate("document.querySelector('details').open")
        assert (visit.said, visit.elsewhere) == ([], [])


def test_a_stranger_gets_one_line_and_no_page(browser: Any, address: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    response = page.goto(address.partition("?")[0])
    assert response.status == 403
    assert "it holds a token" in page.inner_text("body")
    context.close()


def test_another_users_port_gets_no_cookie(browser: Any, address: str) -> None:
    got: list[str] = []

    class Hers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(self.headers.get("Cookie", ""))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<img src=/a><img src=/run/b><iframe src=/></iframe><body>hers")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hers)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Visit(browser, address) as visit:
            # Opened there, so that SameSite counts the page's own requests as the host's.
            visit.page.goto(f"http://127.0.0.1:{server.server_port}/", wait_until="networkidle")
            assert visit.page.inner_text("body") == "hers"
            visit.page.go_back()
            visit.page.wait_for_selector(LIVE)
    finally:
        server.shutdown()
        server.server_close()
    assert len(got) >= 3
    assert set(got) == {""}
