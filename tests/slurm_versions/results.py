"""What was run on which Slurm, and the table of it: `python -m tests.slurm_versions.results` writes the page's.

`benchmarks/results/slurm-VERSION.json` holds, for each case that was run there, its last outcome with the date and the
commit. A case that is run again replaces its own line alone.
"""

import re
from pathlib import Path

import msgspec

from tests.slurm_versions.cases import CASES, ROOT, sentence

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "compatibility.md"
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
    def word(self) -> str:
        """What the page calls it."""
        if self.outcome != "skipped":
            return self.outcome
        return "not applicable" if self.reason.startswith(NOT_APPLICABLE) else "not run"


_NOT_RUN = Outcome(outcome="skipped", date="", commit="", seconds=0.0)


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
    """A row for each part; below it the cases that did not pass, or did not run beside others that did."""
    rows = [("cases", [one.version for one in versions]), ("---", ["---"] * len(versions))]
    notes: dict[str, list[str]] = {}
    for one in versions:
        notes.setdefault(one.origin, []).append(one.version)
    for part, cases in CASES.items():
        rows.append((part, []))
        for one in versions:
            found = {case: one.cases.get(case, _NOT_RUN) for case in cases}
            others = {case: outcome for case, outcome in found.items() if outcome.word != "passed"}
            dates = sorted({outcome.date for outcome in found.values()} - {""})
            passed = f"{len(cases) - len(others)} of {len(cases)}"
            when = " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))
            rows[-1][1].append(f"{passed}, {when}" if dates else "not run")
            for case, outcome in others.items() if dates else ():
                note = f"{outcome.word}: {sentence(case)}; {outcome.reason.removeprefix(NOT_APPLICABLE)}"
                notes.setdefault(note.removesuffix("; "), []).append(one.version)
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]
    return "\n".join([*lines, "", *(f"* {', '.join(where)}: {note}." for note, where in notes.items())])


def page(text: str) -> str:
    """The page with its table made anew."""
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return f"{head}{_BEGIN}\n\n{table(read_versions())}\n\n{_END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
