"""GRPO and PPO by verl itself on the embedded Slurm, for the tests: a run on two nodes, and what is struck in it."""

import time
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.harness import LiveRun
from tests.processes import python_path
from tests.verl.grpo import MODULES, grpo_words, ppo_words, write_config
from verl_slurm.slurm.devcluster.cluster import DevCluster

PATIENCE_S = 400.0
"""For a start: Ray on two nodes, and a dozen processes that import torch and verl."""


def make_run(
    cluster: DevCluster,
    inputs: tuple[Path, Path],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    total_steps: int,
    critic: Path | None = None,
) -> LiveRun:
    """A run of GRPO, or with a critic of PPO, on two nodes with the engine made for tests, not yet submitted.

    Args:
        inputs: directory of the model and file of the prompts.
        critic: directory of the critic.
    """
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", MODULES)
    monkeypatch.setenv("PYTHONPATH", python_path()["PYTHONPATH"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    place.mkdir(exist_ok=True)
    model, prompts = inputs
    words = (
        ppo_words(model, critic, prompts, total_steps) if critic else grpo_words(model, prompts, total_steps)
    )
    config = write_config(place / "run.yaml", place / "run", words)
    return LiveRun(cluster, place / "run", config=str(config))


def end(run: LiveRun) -> None:
    """Ends the run's job; nothing of its Ray may be left."""
    run.cancel()
    run.wait_slurm(lambda facts: facts.state not in ("RUNNING", "PENDING", "COMPLETING"))
    left = [process for process in psutil.process_iter() if of_ray(process, run)]
    assert not left, left


def of_ray(process: psutil.Process, run: LiveRun, word: str = "") -> bool:
    """Whether it is of this run's Ray, and is called so; Ray's workers rename themselves."""
    try:
        mine = process.environ().get("VERL_SLURM_RUN") == str(run.paths.root)
        called = (process.name(), *process.cmdline()[:1])
        return mine and process.status() != psutil.STATUS_ZOMBIE and any(word in name for name in called)
    except psutil.Error:
        return False


def one(run: LiveRun, word: str, node: str | None = None) -> psutil.Process:
    """One of them, as soon as there is one; no event tells that a process has begun."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for process in [p for p in psutil.process_iter() if of_ray(p, run, word)]:
            if node in (None, process.environ().get("SLURMD_NODENAME")):
                return process
        time.sleep(0.2)
    raise AssertionError(f"no {word} on {node}:\n{run.story()}")


def steps(run: LiveRun) -> list[int]:
    """The steps that are done, in the order in which they were."""
    return [int(msgspec.json.decode(line)["step"]) for line in run.paths.steps.read_bytes().splitlines()]


def wait_for_lines(path: Path, count: int) -> None:
    """Polls: no event tells of a line in an engine's log."""
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and len(path.read_bytes().splitlines()) >= count):
        assert time.monotonic() < deadline, f"fewer than {count} responses"
        time.sleep(0.05)
