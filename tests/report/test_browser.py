"""The page in a real browser: harmless, accessible, without a request, at both widths, in the dark and on paper.

VERL_SLURM_SCREENSHOTS=DIR keeps the pictures that the tests make, report-wide.png and report-narrow.png; those of the
docs are made so.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import reward_switch
from tests.interrupted_runs import HOSTILE, HOSTILE_NAME, make_interrupted_run
from tests.report.conftest import WIDTHS, Opened
from verl_slurm.base.paths import RunPaths
from verl_slurm.report.gather import gather
from verl_slurm.report.page import render_page
from verl_slurm.wire.reward_plan import RewardPlan, write_reward_plan

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def _page(folder: Path, runs: list[RunPaths]) -> Path:
    file = folder / "report.html"
    file.write_text(render_page(gather(runs)))
    return file


@pytest.fixture(autouse=True, scope="module")
def without_squeue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slurm is not asked whether a run lives: the browser's event loop runs in this thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path_factory.mktemp("bin")))
        yield


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    return _page(folder, [make_interrupted_run(folder / "grpo-qwen3-4b", 9, path="/models/qwen3-4b")])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    runs = [
        make_interrupted_run(folder / name, 5, seed=seed, actor_lr=1e-6 * seed)
        for name, seed in (("a", 1), ("b", 2))
    ]
    return _page(folder, runs)


@pytest.mark.parametrize("name", WIDTHS)
def test_the_page_fits_its_window_and_draws_every_chart(name: str, browser: Any, one: Path) -> None:
    with Opened(browser, one, WIDTHS[name]) as opened:
        page = opened.page
        assert opened.said == []
        assert opened.requests == [one.as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") == WIDTHS[name]
        rows = page.evaluate(
            "[...document.querySelectorAll('td.w')].map(e => e.parentElement.getBoundingClientRect().height)"
        )
        assert max(rows) < 60, "a text out of sight makes no row high"
        drawn = page.evaluate(
            "[...document.querySelectorAll('.chart')].map(e => e.querySelectorAll('svg path').length)"
        )
        assert len(drawn) == 8
        assert all(count > 2 for count in drawn), drawn
        if folder := os.environ.get("VERL_SLURM_SCREENSHOTS"):
            # Of the narrow page the first screens: whole, it is six times as high as it is wide.
            clip = {"x": 0, "y": 0, "width": WIDTHS[name], "height": 1915 if name == "wide" else 1500}
            page.screenshot(path=Path(folder) / f"report-{name}.png", full_page=True, clip=clip)


@pytest.mark.parametrize(("pages", "scheme"), [("one", "light"), ("one", "dark"), ("two", "light")])
def test_axe_finds_nothing_serious(
    pages: str, scheme: Any, browser: Any, request: pytest.FixtureRequest
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    file: Path = request.getfixturevalue(pages)
    # The page's policy allows no script but its own, and axe is one.
    with Opened(browser, file, color_scheme=scheme, bypass_csp=True) as opened:
        for details in opened.page.query_selector_all("details"):
            details.evaluate("element => { element.open = true }")
        found = axe.Axe().run(opened.page).response["violations"]
        serious = [
            (one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")
        ]
        assert serious == []


def test_hostile_text_does_no_harm(browser: Any, tmp_path: Path) -> None:
    names = {name: HOSTILE + name for name in ("reward", "kl", "policy_loss", "entropy", "response_tokens")}
    runs = [
        make_interrupted_run(tmp_path / "one", 12, text=HOSTILE),
        make_interrupted_run(tmp_path / HOSTILE_NAME, 12, text=HOSTILE, columns=names),
    ]
    for file in (_page(tmp_path, runs), _page(tmp_path, runs[1:])):
        with Opened(browser, file) as opened:
            page = opened.page
            # Every tooltip, too: it is drawn from the same text.
            for chart in page.query_selector_all(".chart"):
                chart.hover(position={"x": 200, "y": 60})
            assert page.evaluate("window.harmed") is None
            assert opened.said == []
            assert opened.requests == [file.as_uri()]
            assert page.query_selector_all("main img, main b, main svg[onload], main script") == []
            assert "</script><script>window.harmed=1</script>" in page.inner_text("main")


def test_the_policy_stops_a_script_that_got_into_the_page(browser: Any, one: Path, tmp_path: Path) -> None:
    """The second line: the first is that none gets in."""
    file = tmp_path / "harmed.html"
    planted = "<main><script>window.harmed=1</script><img src=x onerror='window.harmed=1'>"
    file.write_text(one.read_text().replace("<main>", "<main id=x>").replace('<main id="main">', planted))
    with Opened(browser, file) as opened:
        assert opened.page.evaluate("window.harmed") is None
        assert any("Content Security Policy" in line for line in opened.said)


def test_the_keyboard_zooms_the_timeline_and_opens_the_tables(browser: Any, one: Path) -> None:
    with Opened(browser, one) as opened:
        page = opened.page
        ticks = "[...document.querySelectorAll('[data-timeline] svg text')].map(e => e.textContent).join()"
        before = page.evaluate(ticks)
        page.focus("[data-zoom=in]")
        page.keyboard.press("Enter")
        opened.until(f"{ticks} !== {before!r}")
        page.focus("[data-zoom=all]")
        page.keyboard.press("Space")
        opened.until(f"{ticks} === {before!r}")
        page.focus("summary")
        page.keyboard.press("Enter")
        assert page.evaluate("document.querySelector('details').open")
        assert page.get_by_role("img", name="Timeline. ").count() == 1
        assert page.get_by_role("img", name="Reward: from ").count() == 1


def test_the_dark_page_is_dark_and_prints_on_white(browser: Any, one: Path) -> None:
    with Opened(browser, one, color_scheme="dark") as opened:
        page = opened.page
        line = "document.querySelector('[data-panel] svg path[stroke]').getAttribute('stroke')"
        colours = f"[getComputedStyle(document.body).backgroundColor, {line}]"
        ground, stroke = page.evaluate(colours)
        assert ground == "rgb(16, 19, 23)"
        assert page.pdf(format="A4").startswith(b"%PDF")
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        on_paper, darker = page.evaluate(colours)
        assert on_paper == "rgb(255, 255, 255)"
        assert darker != stroke
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        page.emulate_media(media="screen")
        assert page.evaluate(colours) == [ground, stroke]


def test_two_runs_are_drawn_over_each_other(browser: Any, two: Path) -> None:
    with Opened(browser, two) as opened:
        text = opened.page.inner_text("main")
        assert "Differences of the configurations" in text
        assert "train.actor_lr" in text
        lines = (
            "[...document.querySelectorAll('[data-panel=\"0\"] svg path')].map(e => e.getAttribute('stroke'))"
        )
        strokes = f"new Set({lines}).size"
        assert opened.page.evaluate(strokes) > 2


def test_a_page_of_damaged_runs_has_no_error(browser: Any, tmp_path: Path) -> None:
    runs = [make_interrupted_run(tmp_path / name, 2) for name in ("journal", "steps", "config")]
    for path in (runs[0].events, runs[1].steps, runs[2].run_yaml):
        path.unlink()
    for file in (_page(tmp_path, runs), _page(tmp_path, runs[:1])):
        with Opened(browser, file) as opened:
            assert opened.said == []
            assert "Missing or damaged" in opened.page.inner_text("main")


def test_a_replaced_reward_is_marked_in_the_curves_of_rewards_alone(browser: Any, tmp_path: Path) -> None:
    run = make_interrupted_run(tmp_path / "run", 2)
    write_reward_plan(run, RewardPlan(handled=1, switches=(reward_switch("python:two.py:f", 8),)))
    with Opened(browser, _page(tmp_path, [run])) as opened:
        assert opened.said == []
        marked = opened.page.evaluate(
            "[...document.querySelectorAll('[data-panel]')].map(e =>"
            " [...e.querySelectorAll('svg text')].filter(t => t.textContent === 'reward').length)"
        )
    assert marked[0] == 1
    assert sum(marked) == sum("reward" in title.lower() for title in _titles(run))


def _titles(run: RunPaths) -> list[str]:
    return [curve.title for curve in gather([run]).runs[0].curves]
