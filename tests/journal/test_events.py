"""The vocabulary of the journal: every kind is declared, written, told and read back; the rest is read as it is."""

import ast
import functools
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.journals import make_event
from verl_slurm.base.one_line import json_line
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.show.story import tell
from verl_slurm.journal import events as ev
from verl_slurm.journal.events import KINDS, Event, Other
from verl_slurm.journal.files import append_event, parse_event, read_events, to_json
from verl_slurm.journal.history import History

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
NOW = "2026-11-01T08:01:43.000+00:00"


def parse(**fields: Any) -> Event | None:
    return parse_event(json.dumps(fields).encode())


@functools.cache
def names_in_use() -> set[str]:
    """All names that the library and the daemon use."""
    found = set()
    for folder in ("verl_slurm", "daemon/verl_slurm_daemon"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "events.py" and path.parent.name == "journal":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute | ast.Name):
                    found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def test_every_kind_is_documented_and_written_somewhere() -> None:
    assert [kind for kind, form in KINDS.items() if form.__doc__ in (None, "", Event.__doc__)] == []
    assert {form.__name__ for form in KINDS.values()} - names_in_use() == set()


def test_tests_ask_for_kinds_that_exist() -> None:
    """A name that no event has any more is waited for in vain, and never found where it must not be."""
    asked = re.compile(r"""(?:wait_event|[.]events)[(]\s*"(\w+)"|\["event"\] [!=]= "(\w+)\"""")
    sources = [(path.name, path.read_text()) for path in sorted(TESTS.rglob("*.py"))]
    found = [(name, match[1] or match[2]) for name, text in sources for match in asked.finditer(text)]
    assert len(found) > 100
    unknown = {kind for _, kind in found if kind not in KINDS}
    assert unknown <= {"news"}, unknown  # test_story writes it as a kind of a later version


@pytest.mark.scenario("USE17")
def test_every_kind_is_told_as_a_sentence() -> None:
    for kind in KINDS:
        event = make_event(kind, attempt=1, job_id="7")
        if "name" in event.__struct_fields__:
            event.name = "step_000004"  # type: ignore[attr-defined]
        told = tell(event).partition("  ")[2]
        assert told not in ("", kind)
        assert "=" not in told, f"{kind}: told as it is, not as a sentence"
        assert "None" not in told, kind


def test_every_kind_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    written = [append_event(paths, make_event(kind, attempt=3, job_id="7")) for kind in KINDS]
    assert read_events(paths) == written
    lines = [json.loads(line) for line in paths.events.read_text().splitlines()]
    assert [line["event"] for line in lines] == list(KINDS)
    assert lines == [to_json(event) for event in written]


def test_a_field_is_never_of_a_type_that_a_fold_cannot_compare() -> None:
    for kind, form in KINDS.items():
        for field in msgspec.structs.fields(form):
            assert field.type is not Any, f"{kind}.{field.name}"


@pytest.mark.parametrize(
    "fields",
    [
        {"event": "saved", "name": ["x"], "time": NOW},
        {"event": "saved", "name": "a", "num_bytes": 10**400, "time": NOW},
        {"event": "saved", "name": "a", "num_bytes": 1.5, "time": NOW},
        {"event": "cause", "cause": None, "time": NOW},
        {"event": "crash", "kind": ["hang"], "time": NOW},
        {"event": "ended", "exit_code": "0", "time": NOW},
        {"event": "news", "colour": "red", "time": NOW},
        {"event": "other", "kind": "saved", "time": NOW},
    ],
)
def test_a_line_that_does_not_fit_is_read_as_it_is_and_counted_by_no_fold(fields: dict[str, Any]) -> None:
    event = parse(**fields, attempt=1, job_id="7")
    assert isinstance(event, Other)
    assert (event.kind, event.time, event.attempt, event.job_id) == (fields["event"], NOW, 1, "7")
    assert parse_event(json_line(to_json(event))) == event
    run = History([make_event("started", time=NOW, attempt=1), event])
    assert (run.all_saves, run.outages, run.counts) == ([], [], {"started": 1})
    assert fields["event"] in tell(event)


@pytest.mark.parametrize("line", [b"", b"7", b"[]", b"{}", b'{"event": 7}', b'{"event": "saved"', b"\xff"])
def test_what_is_no_event_is_passed_over(line: bytes) -> None:
    assert parse_event(line) is None


def test_what_stands_around_an_unknown_kind_is_taken_only_where_it_fits() -> None:
    event = parse(event="news", time=7, attempt="x", job_id=["7"])
    assert event == Other("news")


def test_a_field_that_a_later_version_adds_does_not_hide_the_event() -> None:
    assert parse(event="verified", name="step_000004", proof="x") == ev.Verified("step_000004")
