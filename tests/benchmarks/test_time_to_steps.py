"""The chart in the docs is that of the rows in the docs, and the page beside it says what they say."""

import json
import re
from typing import Any

from benchmarks import time_to_steps
from benchmarks.learning import ROOT

DOCS = ROOT / "docs"


def _jobs() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "time-to-steps.json").read_text())["jobs"]
    return found


def test_the_chart_in_the_docs_is_that_of_the_rows_in_the_docs() -> None:
    assert time_to_steps.draw(_jobs()) == (DOCS / "time-to-steps.svg").read_text()


def test_every_job_has_done_every_step_in_its_order() -> None:
    for job in _jobs().values():
        assert len(job["seconds"]) == time_to_steps.STEPS
        assert job["seconds"] == sorted(job["seconds"])
        assert job["starts"] == 1 + len(time_to_steps.FAULTS)


def test_the_page_says_what_the_rows_say() -> None:
    said = re.sub(r"\s+", " ", (DOCS / "figures.md").read_text())
    ends = " / ".join(f"{job['seconds'][-1]:.0f}" for job in _jobs().values())
    assert f"{ends} s" in said
