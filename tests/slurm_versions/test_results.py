"""docs/compatibility.md shows what was run, and nothing else."""

import json
from pathlib import Path

import pytest

from tests.slurm_versions import record
from tests.slurm_versions.cases import CASES, ROOT, sentence
from tests.slurm_versions.results import PAGE, Version, fold, page, read_versions, table, write_version
from tests.slurm_versions.roots import is_version

ALL = [case for cases in CASES.values() for case in cases]
CASE, OTHER = ALL[:2]


def report(when: str, outcome: str, longrepr: object = None) -> pytest.TestReport:
    return pytest.TestReport(CASE, ("", 0, ""), {}, outcome, longrepr, when, duration=1.0)  # type: ignore[arg-type]


def recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *reports: pytest.TestReport
) -> dict[str, object]:
    file = tmp_path / "record"
    monkeypatch.setenv(record.VARIABLE, str(file))
    for each in reports:
        record.pytest_runtest_logreport(each)
    (line,) = file.read_text().splitlines()
    return dict(json.loads(line))


def test_the_table_of_the_page_is_the_one_that_the_results_give() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "python -m tests.slurm_versions.results"


def test_each_case_is_a_test_and_no_result_is_of_another() -> None:
    for case in ALL:
        file, _, name = case.partition("::")
        assert f"\ndef {name.partition('[')[0]}(" in (ROOT / file).read_text(), case
    assert {case for one in read_versions() for case in one.cases} <= set(ALL)


def test_a_case_that_runs_again_replaces_its_own_line_alone_and_a_failure_is_named() -> None:
    passed = [
        json.dumps({"test": case, "outcome": "passed", "seconds": 1.0})
        for case in (CASE, OTHER, "tests/x.py::y")
    ]
    slurm = Version(version="1.2.3", origin="here")
    first = fold(slurm, "\n".join(passed), date="2026-01-01", commit="aaaaaaa")
    assert list(first.cases) == [CASE, OTHER]
    again = json.dumps({"test": CASE, "outcome": "failed", "seconds": 2.0, "reason": "assert 0"})
    second = fold(first, again, date="2026-01-02", commit="bbbbbbb")
    assert second.cases[OTHER] == first.cases[OTHER]
    part, cases = next(iter(CASES.items()))
    lines = table([second]).splitlines()
    assert lines[2] == f"| {part} | 1 of {len(cases)}, 2026-01-01 to 2026-01-02 |"
    assert lines[3].endswith("| not run |")
    notes = [f"failed: {sentence(CASE)}; assert 0", *(f"not run: {sentence(case)}" for case in cases[2:])]
    assert lines[lines.index("") + 1 :] == [f"* 1.2.3: {note}." for note in ("here", *notes)]


def test_what_passes_in_all_phases_has_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reports = [report(when, "passed") for when in ("setup", "call", "teardown")]
    assert recorded(monkeypatch, tmp_path, *reports) == {"test": CASE, "outcome": "passed", "seconds": 3.0}


def test_what_fails_while_it_is_cleaned_up_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reports = [
        report("setup", "passed"),
        report("call", "passed"),
        report("teardown", "failed", "left over\nmore"),
    ]
    line = recorded(monkeypatch, tmp_path, *reports)
    assert (line["outcome"], line["reason"]) == ("failed", "left over")


@pytest.mark.parametrize(
    ("reason", "word"),
    [("not applicable: no such option", "not applicable"), ("no slurmctld here", "not run")],
)
def test_a_skip_says_whether_the_version_or_the_machine_has_nothing_to_show(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, word: str
) -> None:
    skipped = report("setup", "skipped", ("x.py", 1, f"Skipped: {reason}"))
    line = recorded(monkeypatch, tmp_path, skipped, report("teardown", "passed"))
    found = fold(Version(version="1.2.3", origin=""), json.dumps(line), date="2026-01-01", commit="aaaaaaa")
    assert found.cases[CASE].word == word


def test_what_was_written_is_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.slurm_versions.results.RESULTS", tmp_path)
    for version in ("26.05.5", "9.1.0", "24.11.5"):
        write_version(Version(version=version, origin="here"))
    assert [one.version for one in read_versions()] == ["9.1.0", "24.11.5", "26.05.5"]


def test_a_suite_is_a_version_of_slurm_or_a_release_of_debian() -> None:
    suites = ("25.11.7", "trixie", "sid", "25.11")
    assert [suite for suite in suites if is_version(suite)] == ["25.11.7"]
