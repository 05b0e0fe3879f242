"""The table of the last steps in `status`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_checkpoints import make_run
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.show import render
from verl_slurm.cli.show.run_tables import steps_table
from verl_slurm.cli.show.story import progress
from verl_slurm.journal.steps import append_step

Cli = Callable[..., Any]
ROW = {
    "step": 1.0,
    "reward": 0.25,
    "kl": 0.125,
    "policy_loss": -0.5,
    "policy_clip": 0.125,
    "learning_rate": 0.0005,
    "tokens_per_second": 1234.5,
    "step_s": 2.04,
    "communication_share": 0.25,
}


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return make_run(tmp_path / "run")


def test_each_step_is_a_line_with_what_it_has() -> None:
    table, _ = steps_table([ROW, ROW | {"step": 2.0, "eval/reward": 0.5, "kl": "\x1b[31m"}])
    assert list(table) == [
        "step",
        "reward",
        "eval",
        "KL",
        "policy loss",
        "clipped",
        "lr",
        "tok/s",
        "s",
        "comm.",
    ]
    assert [list(line) for line in zip(*table.values(), strict=True)] == [
        ["1", "0.250", "-", "0.125", "-0.5000", "12.5%", "0.0005", "1234", "2.0", "25%"],
        ["2", "0.250", "0.500", "-", "-0.5000", "12.5%", "0.0005", "1234", "2.0", "25%"],
    ]
    assert steps_table([])[0] == {}


def test_a_step_that_was_all_replayed_has_no_speed() -> None:
    table, _ = steps_table([ROW, ROW | {"step": 2.0, "tokens_per_second": 0.0}])
    assert table["tok/s"] == ["1234", "-"]
    replayed = {"step": 2, "steps": 4, "metrics": {"reward": 0.5, "tokens_per_second": 0.0}}
    assert "tok/s" not in progress(replayed)


def test_status_shows_the_last_steps_and_json_all_of_their_numbers(cli: Cli, run: RunPaths) -> None:
    assert "tok/s" not in cli("status", run.root).out
    assert cli("status", run.root, "--json").json["steps"] == []
    for step in range(1, 9):
        append_step(run, 1, ROW | {"step": float(step)})
    lines = cli("status", run.root).out.splitlines()
    table = lines[next(n for n, line in enumerate(lines) if line.split()[:2] == ["step", "reward"]) :]
    assert [line.split()[0] for line in table[2:]] == ["4", "5", "6", "7", "8"]
    assert len(cli("status", run.root, "--steps", 2).out.splitlines()) == len(lines) - 3
    assert "tok/s" not in cli("status", run.root, "--steps", 0).out
    rows = cli("status", run.root, "--steps", 3, "--json").json["steps"]
    assert [row["step"] for row in rows] == [6.0, 7.0, 8.0]
    assert set(ROW) <= set(rows[0])


def test_a_number_that_no_float_can_hold_is_no_row(run: RunPaths, cli: Cli) -> None:
    append_step(run, 1, ROW)
    with run.steps.open("ab") as file:
        file.write(b'{"step": 1%b}\n{"step": 2, "reward": -1%b}\n' % (b"0" * 400, b"0" * 400))
    assert [row["step"] for row in cli("status", run.root, "--json").json["steps"]] == [1.0]
    assert steps_table([{"step": 10**400}])[0] == {}


def test_of_a_loop_that_is_not_ours_its_own_numbers_are_shown_the_most_telling_first() -> None:
    row = {
        "step": 3,
        "attempt": 1,
        "time": "x",
        "aux": 0.5,
        "critic/score/mean": 0.25,
        "actor/pg_loss": -0.5,
        "step_s": 2.0,
    }
    assert steps_table([row])[0] == {
        "step": ["3"],
        "score": ["0.25"],
        "policy loss": ["-0.5"],
        "aux": ["0.5"],
        "s": ["2.0"],
    }
    many = {f"n{k}": float(k) for k in range(30)} | {"step": 1, "loss": 0.125, "step_s": 1.0}
    table, first_to_go = steps_table([many])
    assert list(table) == ["step", "loss", "n0", "n1", "n2", "n3", "n4", "s"]
    assert list(render.fitting(table, first_to_go, 24))[:2] == ["step", "loss"]
    # Two names for one thing: each has its own column.
    assert list(steps_table([{"step": 1, "loss": 0.5, "train/loss": 0.25}])[0]) == [
        "step",
        "loss",
        "train/loss",
    ]
