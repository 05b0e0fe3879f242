"""CI leaves out a long lane only where nothing that the lane tests has changed."""

import re
import subprocess

import pytest

from tests.lanes import ROOT, due_lanes, read_table

TABLE = read_table()
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
).stdout.splitlines()


def test_every_row_of_the_table_names_a_path_that_is_there() -> None:
    rows = [*TABLE.every, *TABLE.starts]
    assert [row for row in rows if not any(path.startswith(row) for path in TRACKED)] == []
    assert len(set(rows)) == len(rows)


def test_every_lane_of_the_table_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^test-([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets >= TABLE.lanes


@pytest.mark.parametrize(
    "part", ["wire/messages.py", "save/anything.py", "base/files.py", "a_new_package/x.py"]
)
def test_what_every_run_goes_through_and_what_has_no_row_start_all_lanes(part: str) -> None:
    assert TABLE.started_by(f"verl_slurm/{part}") == TABLE.lanes
    assert TABLE.started_by("daemon/verl_slurm_daemon/decide/policy.py") == TABLE.lanes


def test_a_marked_test_starts_the_lane_that_runs_it() -> None:
    """Marks and lanes: a test with a lane's mark lies in a folder that starts this lane."""
    lane_of_mark = {"verl": "verl", "trl": "trl", "vllm": "vllm", "s3": "s3"}
    for path in TRACKED:
        if re.fullmatch(r"tests/.*/test_\w+\.py", path):
            marks = set(re.findall(r"mark\.(\w+)\b", (ROOT / path).read_text()))
            if {"verl", "vllm"} <= marks:
                wanted = {"verl-vllm"}
            else:
                wanted = {lane for mark, lane in lane_of_mark.items() if mark in marks}
                if "long" in marks and not wanted:
                    wanted = {"long-slurm" if "slurm" in marks else "long-rest"}
            assert wanted <= TABLE.started_by(path), f"{path}: {sorted(marks)}"


def test_a_lane_is_due_when_it_never_passed_or_a_path_of_its_own_changed() -> None:
    passed: dict[str, list[str] | None] = {lane: [] for lane in TABLE.lanes}
    assert due_lanes(TABLE, passed) == []
    assert due_lanes(TABLE, passed | {"docs": ["docs/limits.md"], "verl": ["docs/limits.md"]}) == ["docs"]
    assert due_lanes(TABLE, passed | {"s3": None}) == ["s3"]
    assert due_lanes(TABLE, {lane: ["verl_slurm/wire/http.py"] for lane in TABLE.lanes}) == sorted(
        TABLE.lanes
    )
