"""The rows of a run's last steps, over restarts, torn lines and a file that is long."""

import json
from pathlib import Path

import pytest

from verl_slurm.base.paths import RunPaths
from verl_slurm.journal import steps as step_log
from verl_slurm.journal.steps import append_step, every_row, last_steps


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def _steps(paths: RunPaths, count: int = 10) -> list[tuple[int, float]]:
    return [(row["attempt"], row["step"]) for row in last_steps(paths, count)]


def test_the_last_steps_come_in_order_with_all_their_numbers(paths: RunPaths) -> None:
    assert last_steps(paths, 5) == []
    for step in range(1, 8):
        append_step(paths, 1, {"step": float(step), "reward": step / 8})
    assert _steps(paths, 3) == [(1, 5.0), (1, 6.0), (1, 7.0)]
    (row,) = last_steps(paths, 1)
    assert {key: row[key] for key in ("attempt", "step", "reward")} == {
        "attempt": 1,
        "step": 7.0,
        "reward": 0.875,
    }
    assert row["time"].endswith("+00:00")
    assert paths.steps.stat().st_mode & 0o777 == 0o600


def test_steps_that_are_done_again_count_once_and_what_was_lost_is_not_shown(paths: RunPaths) -> None:
    for step in range(1, 8):
        append_step(paths, 1, {"step": float(step)})
    for step in (5, 6):  # resumed from step 4
        append_step(paths, 2, {"step": float(step)})
    assert _steps(paths) == [(1, 1.0), (1, 2.0), (1, 3.0), (1, 4.0), (2, 5.0), (2, 6.0)]


def test_lines_that_are_no_rows_are_passed_over(paths: RunPaths) -> None:
    append_step(paths, 1, {"step": 1.0})
    with paths.steps.open("ab") as file:
        file.write(b'[1]\n{"step": true}\n{"no": 1}\n\xff\xfe\n{"step": 2.0, "ep')  # the power went
    append_step(paths, 2, {"step": 2.0})
    assert _steps(paths) == [(1, 1.0), (2, 2.0)]


def test_of_a_long_file_only_the_end_is_read(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"step": step, "attempt": 1}) for step in range(1, 2001)]
    paths.steps.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(step_log, "_MOST", len(lines[-1]) * 3 + 10)
    # Three whole lines and part of one, which is no line.
    assert _steps(paths, 100) == [(1, 1998), (1, 1999), (1, 2000)]


def test_of_a_file_of_any_length_the_newest_rows_are_read_and_the_rest_is_told(paths: RunPaths) -> None:
    with paths.steps.open("wb") as file:
        file.truncate(300 << 30)
    append_step(paths, 1, {"step": 7.0})
    unread: list[str] = []
    assert [row["step"] for row in every_row(paths, unread=unread)] == [7.0]
    assert unread[0].startswith("steps.jsonl: its first 321,988,")
    assert "were not read" in unread[0]


def test_of_too_many_rows_the_newest_are_read(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "_MOST_LINES", 3)
    unread: list[str] = []
    for step in range(1, 4):
        append_step(paths, 1, {"step": float(step)})
    assert [row["step"] for row in every_row(paths, unread=unread)] == [1, 2, 3]
    assert unread == []
    append_step(paths, 1, {"step": 4.0})
    assert [row["step"] for row in every_row(paths, unread=unread)] == [2, 3, 4]
    assert len(unread) == 1
