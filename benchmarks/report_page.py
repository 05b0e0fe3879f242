"""How large the page of `verl-slurm report` is, and how long it takes: `python benchmarks/report_page.py [--json]`

The run is made for it (`tests/interrupted_runs.py`), with 200 interruptions unless `--interruptions` says otherwise.
Measured: the bytes of the page; the whole command in a process of its own; and, in Debian's Chromium, the time from the
navigation to the last chart, at 1440 and at 360 pixels (`performance.mark` in the page's script). Each is a median of
`--repeats`; the machine's load is beside them.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.interrupted_runs import make_interrupted_run

_WIDTHS = (1440, 360)


def command_s(run: Path, page: Path) -> float:
    """Seconds of wall time of the command."""
    argv = [sys.executable, "-m", "verl_slurm.cli", "report", str(run), "--out", str(page)]
    began = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def drawn_s(page: Path, repeats: int) -> dict[int, list[float]]:
    """Width -> seconds from the navigation to the last chart; none without a browser."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("no browser here (make browser; pip install '.[dev]'): nothing is drawn", file=sys.stderr)
        return {}
    found: dict[int, list[float]] = {width: [] for width in _WIDTHS}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        for _ in range(repeats):
            for width in _WIDTHS:
                window = browser.new_page(viewport={"width": width, "height": 900})
                window.goto(page.as_uri())
                mark = window.evaluate("performance.getEntriesByName('drawn')[0].startTime")
                found[width].append(mark / 1000)
                window.close()
        browser.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--interruptions", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = make_interrupted_run(Path(place) / "run", options.interruptions)
        page = Path(place) / "report.html"
        commands = [command_s(run.root, page) for _ in range(options.repeats)]
        drawn = drawn_s(page, options.repeats)
        found: dict[str, Any] = {
            "interruptions": options.interruptions,
            "page_bytes": page.stat().st_size,
            "command_s": round(statistics.median(commands), 3),
            "drawn_s": {width: round(statistics.median(seconds), 3) for width, seconds in drawn.items()},
            "drawn_worst_s": {width: round(max(seconds), 3) for width, seconds in drawn.items()},
            "load": round(os.getloadavg()[0], 2),
            "cores": os.cpu_count(),
        }
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:16} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
