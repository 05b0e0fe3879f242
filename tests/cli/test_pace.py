"""How far a run is: the bar, the time left, the curve and the nodes of `status` and `watch`."""

import json
import re
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.many_runs import make_run
from tests.terminal import on_a_terminal
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.show import render
from verl_slurm.cli.show.run_tables import (
    Curve,
    curve_of,
    curve_words,
    left_words,
    live_line,
    node_words,
    sparkline,
    steps_words,
)
from verl_slurm.journal.pace import Pace, pace_of
from verl_slurm.journal.steps import append_step

Cli = Callable[..., Any]
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
PACE = Pace(steps_done=24, steps=100, step_s=11.0, steps_timed=24, seconds_left=836.0)
REWARD = Curve(name="reward", called="reward", values=[0.0, 0.5, 1.0])


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run whose lead says that it trains; its process is no more."""
    paths = make_run(tmp_path / "run", cluster="local", job_id="999999999", host=socket.gethostname())
    for step in range(1, 25):
        append_step(paths, 1, {"step": float(step), "reward": step / 25, "step_s": 11.0, "policy_loss": 0.1})
    status = json.loads(paths.status.read_text())
    status |= {"step": 24, "steps": 100, "train_nodes": ["n1", "n2"], "spare_nodes": ["n3"]}
    paths.status.write_text(json.dumps(status))
    return paths


@pytest.mark.parametrize(
    ("share", "drawn"), [(0.0, "░░░░"), (0.5, "██░░"), (0.29, "█▏░░"), (1.0, "████"), (0.999, "███▉")]
)
def test_a_bar_is_full_when_all_is_done(share: float, drawn: str) -> None:
    assert render.bar(share, 4) == drawn


def test_a_curve_goes_from_its_lowest_to_its_highest_value() -> None:
    assert sparkline([0.0, 0.5, 1.0], 8) == "▁▅█"
    assert sparkline([9.0, 0.0, 1.0], 2) == "▁█", "the last values"
    assert sparkline([2.0, 2.0], 8) == "▄▄"
    assert sparkline([-1e308, 1e308], 8) == "▁█"
    assert sparkline([5e-324, 1e-323], 8) != ""
    assert sparkline([], 8) == sparkline([1.0], 0) == ""


def test_the_curve_is_that_of_the_reward_or_of_what_a_guest_has() -> None:
    ours = [{"reward": 0.1, "loss": 1.0}, {"reward": "\x1b[31m"}, {"reward": 0.2}]
    found = curve_of(ours)
    assert found is not None
    assert (found.called, found.values) == ("reward", [0.1, 0.2])
    of_verl = curve_of([{"critic/score/mean": 0.5}] * 2)
    assert of_verl is not None
    assert of_verl.called == "score"
    of_others = curve_of([{"loss": 0.5}] * 2)
    assert of_others is not None
    assert of_others.called == "loss"
    assert curve_of([{"aux": 1.0}] * 2) is None
    assert curve_of([{"reward": 1.0}]) is None, "one value is no curve"


def test_words_tell_all_that_is_drawn() -> None:
    assert steps_words(PACE) == "24 of 100, 24%"
    assert steps_words(pace_of([], 3, None)) == "3 done; the loop does not say of how many"
    assert curve_words(REWARD, 8) == "reward ▁▅█ 0 to 1 in 3 steps"
    assert curve_words(REWARD, 0) == "reward 0 to 1 in 3 steps"


def left(pace: Pace = PACE, *, waits: bool = False, over: bool = False, **times: datetime | None) -> str:
    return left_words(pace, waits=waits, over=over, now=NOW, **times)


def test_the_time_left_says_what_it_does_not_count() -> None:
    about = "about 13 min 56 s of training, at 11 s a step"
    assert left() == f"{about}, without further interruptions"
    assert left(over=True) == f"{about}; no job is running"
    assert left(waits=True) == f"{about}, once the job has started: when is not known"
    assert "Slurm expects that at 11-2" in left(waits=True, starts=NOW + timedelta(hours=1))
    assert "the job's time limit comes before" in left(ends=NOW + timedelta(minutes=5))
    assert left(ends=NOW + timedelta(hours=5)) == left()
    assert left(pace_of([], 3, 10)) == "not known: no step has a time yet"
    assert left(pace_of([{"step_s": 1.0}], 3, None)) == "not known: the loop has no last step"
    assert left(pace_of([], 10, 10)) == "none: all steps are done"


def test_nodes_are_counted_and_the_first_of_many_named() -> None:
    assert node_words({"training": ["n1", "n2"], "spare": ["n3"]}) == "2 training (n1, n2), 1 spare (n3)"
    many = node_words({"training": [f"n{k}" for k in range(64)]})
    assert many.endswith("n5 and 58 others)")


@pytest.mark.parametrize("width", [120, 80, 60, 40, 20])
def test_the_live_line_fits_and_keeps_the_step(width: int) -> None:
    words = "step 24/100  sampling 3  reward 0.512  kl 0.01  900 tok/s  loss 0.5"
    line = live_line(words, PACE, REWARD, {"training": ["n1"], "lost": ["n2"]}, width)
    assert len(line) < width
    assert "step 24/100" in line
    assert ("13 min 56 s left" in line) == (width >= 40)
    assert ("██▉░░░░░░░░░" in line) == (width >= 80)


def test_the_trend_does_not_join_the_scales_of_two_rewards() -> None:
    rows = [{"reward": 0.2}, {"reward": 0.3}, *({"reward": 40.0 + n, "reward_number": 1} for n in range(3))]
    found = curve_of(rows)
    assert found is not None
    assert found.values == [40.0, 41.0, 42.0]
    assert curve_of(rows[:3]) is None, "one step of the new reward is no trend"


@pytest.mark.parametrize(
    "equal",
    [
        {"equal_rewards": 1.0},
        {"frac_reward_zero_std": 1.0},
        {"critic/score/min": 0.5, "critic/score/max": 0.5},
    ],
)
def test_steps_whose_rewards_are_all_equal_are_counted(
    cli: Cli, run: RunPaths, equal: dict[str, float]
) -> None:
    assert "nothing is learned" not in cli("status", run.root).out
    for step in (25, 26):
        append_step(run, 1, {"step": float(step), "reward": 1.0, **equal})
    out = " ".join(cli("status", run.root).out.split())
    assert "all equal in 2 of the last 26 steps, newest 26: nothing is learned from them" in out


def test_nothing_is_drawn_without_a_terminal(cli: Cli, run: RunPaths) -> None:
    for words in (("status", run.root), ("watch", run.root)):
        out = cli(*words).out
        assert not re.search("[█░▁▂▃▄▅▆▇\x1b\r]", out)
        assert "13 min 56 s" in out
    assert "steps        24 of 100, 24%" in cli("status", run.root).out
    facts = cli("status", run.root, "--json").json
    assert facts["pace"] == msgspec.structs.asdict(PACE)
    assert facts["curve"]["values"][-1] == 0.96
    assert facts["nodes"] == {}, "its job is gone, and with it the nodes"
    assert len(facts["steps"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("columns", [100, 40])
def test_a_terminal_shows_bar_and_curve_in_its_width(run: RunPaths, columns: int) -> None:
    shown = on_a_terminal("status", run.root, columns=columns, env={"NO_COLOR": "1"})
    assert shown.code == 0
    lines = {line.partition("  ")[0]: line for line in shown.lines}
    assert re.search("█+.?░+ 24 of 100", lines["steps"])
    assert "▁" in lines["trend"]
    assert "\x1b[3" not in shown.text, "no colour"
    fields = shown.text.partition("interrupted ")[0].splitlines()
    long = [line for line in fields if len(line.rstrip()) > columns]
    assert all(str(run.root) in line for line in long), "a path is never broken"


@pytest.mark.slow
def test_a_followed_run_has_one_line_that_is_drawn_again(run: RunPaths) -> None:
    shown = on_a_terminal("watch", run.root, columns=100)
    assert "\r\x1b[K██▉░░░░░░░░░  step 24/100" in shown.text
    assert "13 min 56 s left" in shown.text
    assert "1 spare" in shown.text


def test_long_work_tells_each_of_its_kinds_once_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = render.Bar(tells=True)
    for text in ("reading", "writing (1 GB)", "writing (2 GB)"):
        bar.show(text)
    render.Bar().show("not asked for")
    assert capsys.readouterr().err == "verl-slurm: reading\nverl-slurm: writing (1 GB)\n"
