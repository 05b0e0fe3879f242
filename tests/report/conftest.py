"""Debian's Chromium, driven by playwright; without them the tests of the browser are not run."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
WIDTHS = {"wide": 1440, "narrow": 360}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser. For one module: playwright's loop runs in this thread meanwhile, where no other can."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="NOT RUN: no playwright here (pip install .[dev])"
    )
    if CHROMIUM is None:
        pytest.skip("NOT RUN: no chromium here (make browser)")
    with sync_api.sync_playwright() as playwright:
        # As root, Chromium has no sandbox; what it opens here is made by these tests.
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield started
        started.close()


class Opened:
    """A page in the browser, once READY holds in it, with all that it said and asked for."""

    READY = "performance.getEntriesByName('drawn').length > 0"

    def __init__(self, browser: Any, page: Path | str, width: int = WIDTHS["wide"], **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(page if isinstance(page, str) else page.as_uri())
        self.until(self.READY)

    def until(self, condition: str) -> None:
        """Return once the page's `condition` holds; the promise rejects after 30 seconds.

        Not by wait_for_function: if the first look fails, the page's policy forbids the eval of the next.
        """
        self.page.evaluate(
            f"""() => new Promise((done, fail) => {{
                setTimeout(() => fail(new Error("not within 30 seconds")), 30000);
                (function look() {{ ({condition}) ? done() : requestAnimationFrame(look); }})();
            }})"""
        )

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()
