"""What was run on which Slurm, and the table of it: `python -m tests.slurm_versions.results` writes the page's.

`benchmarks/results/slurm-VERSION.json` holds, for each case that was run there, its last outcome with the date and the
commit. A case that is run again replaces its own line alone.
"""

import re
from pathlib import Path

import msgspec

from tests.slurm_versions.cases import CASES, ROOT, sentence

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "slurm-versions.md"
_BEGIN, _END = "<!-- python -m tests.slurm_versions.results writes from here -->", "<!-- to here -->"

NOT_APPLICABLE = "not applicable: "
"""How the reason of a skip begins where the version has nothing to show, as opposed to a machine that lacks a tool."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last run of one case."""

    outcome: str
    """passed, failed, or skipped."""
    date: str
    commit: str
    """`+`: with changes that were not committed."""
    seconds: float
    reason: str = ""
    """Of a failure or a skip."""

    @property
    def shown(self) -> str:
        """The cell of the table."""
        if self.outcome == "skipped":
            word = "not applicable" if self.reason.startswith(NOT_APPLICABLE) else "not run"
        else:
            word = self.outcome if self.outcome == "passed" else f"**{self.outcome}**"
        return f"{word} {self.date} `{self.commit}`"


class Version(msgspec.Struct, kw_only=True):
    """One Slurm."""

    version: str
    origin: str
    """Where its programs are from."""
    cases: dict[str, Outcome] = {}


class _Line(msgspec.Struct):
    """A line that `record.py` writes."""

    test: str
    outcome: str
    seconds: float
    reason: str = ""


def fold(found: Version, record: str, *, date: str, commit: str) -> Version:
    """The version with what a run recorded; tests that are no cases are left out."""
    listed = {case for cases in CASES.values() for case in cases}
    cases = dict(found.cases)
    for text in record.splitlines():
        line = msgspec.json.decode(text, type=_Line)
        if line.test in listed:
            cases[line.test] = Outcome(
                outcome=line.outcome, date=date, commit=commit, seconds=line.seconds, reason=line.reason
            )
    return Version(version=found.version, origin=found.origin, cases=cases)


def read_versions() -> list[Version]:
    """All that were run, the oldest first."""
    files = RESULTS.glob("slurm-*.json")
    found = [msgspec.json.decode(file.read_bytes(), type=Version) for file in files]
    return sorted(found, key=lambda one: [int(part) for part in re.findall(r"\d+", one.version)])


def write_version(version: Version) -> Path:
    """Writes its file; the cases in the order of the table."""
    order = [case for cases in CASES.values() for case in cases]
    version.cases = {case: version.cases[case] for case in order if case in version.cases}
    file = RESULTS / f"slurm-{version.version}.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(version), indent=1) + b"\n")
    return file


def table(versions: list[Version]) -> str:
    """The matrix, and what stands below it."""
    lines = [
        f"| case | {' | '.join(one.version for one in versions)} |",
        f"| --- |{' --- |' * len(versions)}",
    ]
    for part, cases in CASES.items():
        lines.append(f"| **{part}** |{' |' * len(versions)}")
        for case in cases:
            cells = [one.cases[case].shown if case in one.cases else "not run" for one in versions]
            lines.append(f"| {sentence(case)} | {' | '.join(cells)} |")
    lines += ["", *(f"* {one.version}: {one.origin}." for one in versions)]
    for one in versions:
        for case, outcome in one.cases.items():
            if outcome.reason:
                lines.append(
                    f"* {one.version}, {sentence(case)}: {outcome.reason.removeprefix(NOT_APPLICABLE)}"
                )
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its table made anew."""
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return f"{head}{_BEGIN}\n\n{table(read_versions())}\n\n{_END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
