"""`verl-slurm demo`, small: with a real Slurm, and without."""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.harness import ROOT, SMALL
from tests.journals import make_event
from tests.processes import captured
from verl_slurm.base.errors import NotFound
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.cli.__main__ import main
from verl_slurm.cli.setup.demo_run import timings
from verl_slurm.slurm.devcluster.machine import real_gpus

QUICK = (*SMALL, "train.steps=6", "train.batch_size_per_device=192")


def _demo(directory: Path, *options: str) -> dict[str, object]:
    done = captured(
        [sys.executable, "-m", "verl_slurm.cli", "demo", "--json", "--dir", str(directory), *options, *QUICK],
        cwd=ROOT,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, object] = msgspec.json.decode(done.stdout)
    return answer


def _nothing_is_left(directory: Path) -> None:
    left = [
        p for p in psutil.process_iter(["cmdline"]) if str(directory) in " ".join(p.info["cmdline"] or [])
    ]
    assert not left


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.soak  # as root; as an ordinary user: tests/devcluster/test_everywhere.py
def test_the_demo_preempts_a_run_on_a_real_slurm_and_proves_it_unharmed(
    short_dir: Path,
) -> None:
    answer = _demo(short_dir)
    assert answer["cluster"] == "slurm"
    assert answer["same"]
    assert "_sp" in str(answer["checkpoint"]), "in the middle of a step"
    _nothing_is_left(short_dir)


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.soak  # with a real Slurm: tests/devcluster/test_everywhere.py
def test_without_slurm_the_demo_does_the_same_on_this_machine(short_dir: Path) -> None:
    answer = _demo(short_dir, "--cluster", "local")
    assert answer["cluster"] == "local"
    assert answer["same"]
    _nothing_is_left(short_dir)


def test_from_any_directory_the_quick_start_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []

    def run_demo(config: Path, *_: object, **__: object) -> None:
        asked.append(config)
        raise NotFound("no demo")

    monkeypatch.setattr("verl_slurm.cli.setup.demo_command.run_demo", run_demo)
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == ExitCode.NOT_FOUND
    assert asked == [ROOT / "configs/quickstart.yaml"]


@pytest.mark.parametrize(
    ("gpus", "torch", "words", "asked"),
    [
        (["/dev/nvidia0"], "2.13.0", [], "cuda"),
        (["/dev/nvidia0"], "2.13.0+cpu", [], None),
        ([], "2.13.0", [], None),
        (["/dev/nvidia0"], "2.13.0", ["distributed.device=cpu"], None),
    ],
)
@pytest.mark.scenario("GPU2")
def test_the_demo_asks_for_a_gpu_where_there_is_one(
    gpus: list[str], torch: str, words: list[str], asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def run_demo(_config: Path, overrides: list[str], *_: object, **__: object) -> None:
        seen.append(overrides)
        raise NotFound("no demo")

    monkeypatch.setattr("verl_slurm.cli.setup.demo_command.run_demo", run_demo)
    monkeypatch.setattr("verl_slurm.cli.setup.demo_command.real_gpus", lambda: gpus)
    monkeypatch.setattr("importlib.metadata.version", lambda _: torch)
    assert main(["demo", *words, "--dir", "nowhere"]) == ExitCode.NOT_FOUND
    on_a_gpu = ["distributed.device=cuda", "slurm.gpus_per_node=1"]
    assert [word for word in on_a_gpu if word in seen[0]] == (on_a_gpu if asked else [])


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.gpu
def test_the_demo_trains_on_a_gpu_that_slurm_grants(short_dir: Path) -> None:
    """The form on a GPU of the test at the top."""
    if not real_gpus():
        pytest.skip("NOT RUN: there is no GPU here")
    assert _demo(short_dir)["same"]


def test_the_stations_of_an_interruption_are_read_from_the_journal() -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    story = [
        ("started", {}),
        ("training", {}),
        ("first_rollout", {}),
        ("saved", {"emergency": False}),
        ("cause", {"cause": "preemption"}),
        ("saved", {"emergency": True}),
        ("verified", {}),
        ("requeue", {"accepted": True}),
        ("started", {}),
        ("training", {}),
        ("first_rollout", {}),
    ]
    events = [
        make_event(name, time=(begin + timedelta(seconds=n)).isoformat(), **fields)
        for n, (name, fields) in enumerate(story)
    ]
    timing = timings(events)
    assert timing.cause_to_saved == 1.0
    assert timing.requeued_to_started == 1.0
    assert timing.cause_to_first_rollout == 6.0
