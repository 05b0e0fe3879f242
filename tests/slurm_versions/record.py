"""A plugin of pytest: one JSON line for each test that has ended, at once. What an interrupted run did show is kept."""

import json
import os
from pathlib import Path

import pytest

VARIABLE = "VERL_SLURM_VERSIONS_RECORD"
"""Names the file."""

_said: dict[str, dict[str, object]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up the three phases of a test: the worst of their outcomes counts."""
    line = _said.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
    line["seconds"] = round(float(str(line["seconds"])) + report.duration, 1)
    if report.failed or (report.skipped and line["outcome"] == "passed"):
        line["outcome"] = report.outcome
        # A skip's place is (file, line, "Skipped: reason").
        where = report.longrepr
        line["reason"] = (
            where[2].removeprefix("Skipped: ") if isinstance(where, tuple) else _last_line(report)
        )
    if report.when == "teardown":
        with open(Path(os.environ[VARIABLE]), "a") as file:
            file.write(json.dumps(_said.pop(report.nodeid)) + "\n")


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(getattr(crash, "message", report.longrepr)).partition("\n")[0][:200]
