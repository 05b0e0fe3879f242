"""The facts of a report: the same numbers as `status` and the metrics, of whole runs, guests and damaged ones."""

import os
import shutil
from pathlib import Path

import pytest

from tests.builders import reward_switch
from tests.interrupted_runs import make_interrupted_run
from tests.journals import append_event
from tests.many_runs import make_run
from verl_slurm.base.errors import NotFound
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.files import read_history
from verl_slurm.journal.steps import every_row
from verl_slurm.report.gather import gather
from verl_slurm.report.page import chart_data, render_page
from verl_slurm.report.report_facts import RunFacts
from verl_slurm.runs.run_record import require_traces
from verl_slurm.wire.reward_plan import RewardPlan, write_reward_plan

OF_VERL = {"reward": "critic/score/mean", "kl": "actor/kl_loss", "policy_loss": "actor/pg_loss", "entropy": "",
           "response_tokens": "response_length/mean", "tokens_per_second": "perf/throughput",
           "generate_s": "timing_s/gen", "score_s": "timing_s/update_weights", "update_s": "timing_s/update_actor",
           "stall_s": ""}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return make_interrupted_run(tmp_path_factory.mktemp("runs") / "run", 12)


def facts(paths: RunPaths) -> RunFacts:
    """Its facts, of which the page can be drawn."""
    report = gather([paths])
    assert render_page(report).endswith("</html>")
    return report.runs[0]


def test_goodput_is_that_of_the_metrics_port(run: RunPaths) -> None:
    numbers = read_history(run)
    for row in every_row(run):
        numbers.feed_row(row)
    use = facts(run).time_use
    assert use is not None
    assert use.goodput == numbers.goodput(0.0)
    assert use.allocated_s == round(numbers.allocated_seconds(0.0), 3)
    queued = use.parts["queued"] + use.parts["requeued"]
    assert use.wall_s == pytest.approx(use.allocated_s + queued, abs=0.01)


def test_hours_are_those_of_the_gpus_that_were_held(run: RunPaths) -> None:
    found = facts(run)
    assert found.time_use is not None
    assert found.cost is not None
    assert found.cost.unit == "GPU"
    assert found.cost.hours == pytest.approx(found.time_use.allocated_s * 2 * 8 / 3600, rel=1e-3)


def test_nodes_that_an_attempt_got_count_instead_of_those_it_asked_for(tmp_path: Path) -> None:
    paths = make_interrupted_run(tmp_path / "run", 0, min_nodes=1)
    whole = facts(paths).cost
    lines = paths.events.read_bytes().splitlines(keepends=True)
    paths.events.write_bytes(b"".join(lines[:2]))
    append_event(
        paths, "nodes_chosen", attempt=1, job_id="7", train=["node1"], time="2026-11-01T08:10:01.000+00:00"
    )
    paths.events.write_bytes(paths.events.read_bytes() + b"".join(lines[2:]))
    half = facts(paths).cost
    assert whole is not None
    assert half is not None
    assert half.hours == pytest.approx(whole.hours / 2, rel=1e-3)


def test_a_replaced_reward_is_on_the_page(tmp_path: Path) -> None:
    paths = make_interrupted_run(tmp_path / "run", 0)
    assert facts(paths).rewards == []
    write_reward_plan(paths, RewardPlan(handled=1, switches=(reward_switch("python:two.py:f", 8),)))
    report = gather([paths])
    (one,) = report.runs[0].rewards
    assert (one.step, one.reward) == (9, "python:two.py:f")
    assert report.runs[0].description["Algorithm"].endswith("; since step 9 python:two.py:f")
    page = render_page(report)
    assert "reward was replaced at step 9: python:two.py:f in place of" in page
    assert "another reward since step 9" in page
    replaced = [panel["replaced"] for panel in chart_data(report)["panels"]]
    assert replaced[0] == [9], "the curve of the reward"
    assert not any(replaced[2:])


def test_checkpoints_have_size_stall_and_verdict(run: RunPaths) -> None:
    found = facts(run).checkpoints
    periodic = next(one for one in found if not one.emergency)
    assert (periodic.verified, periodic.num_bytes, periodic.stall_s) == ("verified", 16_000_000_000, 0.4)
    assert {one.emergency for one in found} == {True, False}
    times = [one.time for one in found if one.time is not None]
    assert times == sorted(times, reverse=True)


def test_bad_and_slow_nodes_and_warnings_are_told(run: RunPaths) -> None:
    found = facts(run)
    assert {one.what for one in found.nodes} == {"slow", "hang", "avoided"}
    assert found.nodes[0].node == "node2"
    assert [one.topic for one in found.warnings] == ["storage"]


def test_a_checkpoint_that_is_gone_is_among_the_warnings(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "done")
    assert facts(paths).warnings == []
    (*_, newest) = sorted(paths.checkpoints.iterdir())
    shutil.rmtree(newest)
    assert f"{newest.name} was verified and is gone" in facts(paths).warnings[0].text


def test_a_run_that_has_not_ended_is_provisional(tmp_path: Path) -> None:
    assert facts(make_interrupted_run(tmp_path / "run", 1, ended=False)).provisional


@pytest.mark.parametrize(
    ("backend", "more"),
    [
        ("command", {"command": ("train.py",)}),
        ("verl", {"verl": {"data.train_batch_size": 16, "actor_rollout_ref.rollout.n": 8}}),
        ("ray", {"command": ("train.py",)}),
    ],
)
def test_runs_of_other_loops_have_all_that_their_loop_reports(
    backend: str, more: dict[str, object], tmp_path: Path
) -> None:
    found = facts(make_interrupted_run(tmp_path / "run", 4, columns=OF_VERL, backend=backend, **more))
    assert found.missing == []
    assert found.backend == backend
    assert {"reward", "kl", "loss", "length", "tokens_per_second"} <= {one.name for one in found.curves}
    assert found.time_use is not None
    assert found.time_use.goodput is not None
    assert found.weight_sync_s is not None
    assert (found.tokens.used is not None) == (backend == "verl")


@pytest.mark.parametrize("name", ["run.yaml", "events.jsonl", "steps.jsonl"])
@pytest.mark.parametrize("damage", ["gone", "torn", "empty", "a directory"])
def test_a_damaged_run_has_the_rest_and_says_what_is_missing(name: str, damage: str, tmp_path: Path) -> None:
    paths = make_interrupted_run(tmp_path / "run", 3)
    file = paths.root / name
    whole = file.read_bytes()
    file.unlink()
    if damage == "torn":
        file.write_bytes(whole[: len(whole) // 2] + b"\n\xff{[\x00")
    elif damage == "empty":
        file.touch(mode=0o600)
    elif damage == "a directory":
        file.mkdir()
    found = facts(paths)
    assert any(name in one for one in found.missing), found.missing
    assert bool(found.timeline) == (name != "events.jsonl" or damage == "torn")
    assert bool(found.curves) == (name != "steps.jsonl" or damage == "torn")
    assert bool(found.description.get("Model")) == (name != "run.yaml")
    assert found.samples, "whatever else is lost"
    if not found.timeline:
        assert (found.state, found.provisional) == ("unknown", False), "status.json says that it ended"


def test_a_run_of_which_one_file_is_left_has_a_page(tmp_path: Path) -> None:
    paths = make_interrupted_run(tmp_path / "run", 3)
    for file in (paths.run_yaml, paths.steps, paths.status, paths.samples):
        file.unlink()
    os.rmdir(paths.checkpoints)
    assert len(facts(require_traces(paths)).missing) == 3
    paths.events.unlink()
    with pytest.raises(NotFound, match="not a run directory"):
        require_traces(paths)


def test_several_runs_are_told_apart_by_the_keys_in_which_they_differ(tmp_path: Path) -> None:
    one = make_interrupted_run(tmp_path / "one", 1)
    two = make_interrupted_run(tmp_path / "two", 1, actor_lr=0.5)
    lost = make_interrupted_run(tmp_path / "lost", 1)
    lost.run_yaml.unlink()
    report = gather([one, two, lost])
    assert [(setting.key, setting.values) for setting in report.differences] == [
        ("train.actor_lr", ["0.001", "0.5", None])
    ]
    page = render_page(report)
    assert "3 runs compared" in page
    assert "train.actor_lr" in page


def test_runs_of_one_name_are_named_by_their_directories(tmp_path: Path) -> None:
    runs = [make_interrupted_run(tmp_path / place / "run", 0) for place in ("x", "y")]
    assert [run.name for run in gather(runs).runs] == ["x/run", "y/run"]


def test_the_address_of_a_webhook_is_not_shown(tmp_path: Path) -> None:
    made = {
        name: make_interrupted_run(tmp_path / name, 0, webhook=f"https://x.org/{name}") for name in ("a", "b")
    }
    report = gather(list(made.values()))
    assert [(one.key, one.values) for one in report.differences] == [("hooks.webhook", ["(not shown)"] * 2)]
