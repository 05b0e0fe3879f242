"""Several who want the same thing at once: real processes, one run.

What is small of it runs with the other tests; `VERL_SLURM_SOAK=200 pytest -m soak tests/hostile/test_rivals.py` has
200 rounds for one run, and all of a run's readers and writers at work for ten minutes.
"""

import asyncio
import contextlib
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verl_slurm_daemon.allocation.successor import queue_successor

from tests.checkpoint.conftest import manifest_of, stage
from tests.hostile.racing import FORK, PATIENCE_S, processes
from tests.journals import read_events
from tests.tiers.conftest import config_of, copies_of, opened, posix_config
from verl_slurm.base.errors import CheckpointCorrupt, Fenced, NotFound, TierError
from verl_slurm.base.fence import read_owner, require_attempt, take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.retention import plan_prune
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.manifest import parse
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.commit import commit, sweep
from verl_slurm.checkpoint.store.pruning import apply_prune
from verl_slurm.checkpoint.store.scrub import scrub_one
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.checkpoint.tiers.fetch import fetch
from verl_slurm.checkpoint.tiers.mover import sync
from verl_slurm.checkpoint.tiers.survey import Memory, OpenTier
from verl_slurm.config.load import parse_config

pytestmark = pytest.mark.slow

SEED = 5
MANY = int(os.environ.get("VERL_SLURM_SOAK") or 200)


# ---- two jobs, one run (C01)


def contender(name: str, root: Path, rounds: int, barrier: Any, told: Any) -> None:
    """What a lead does at its start, and then, whether it won or not, a save under the number it would have."""
    paths, dice = RunPaths(root), random.Random(f"{SEED} {name}")
    for number in range(rounds):
        former = read_owner(paths)
        barrier.wait(PATIENCE_S)
        for _ in range(dice.randrange(3000)):
            pass  # not both at the very same tick
        try:
            attempt = take_attempt(paths, job_id=name, restart=number, after=former).attempt
        except Fenced as error:
            attempt = -int(error.exit_code)
        staging = stage(paths, number + 1)
        wanted = (former.attempt if former else 0) + (1 if attempt > 0 else 0)
        try:
            commit(
                staging,
                manifest_of(staging, attempt=wanted),
                attempt_check=lambda wanted=wanted: require_attempt(paths, wanted),  # type: ignore[misc]
            )
            saved = True
        except Fenced:
            saved = False
        told.put((number, name, attempt, saved))
        barrier.wait(PATIENCE_S)


def race(root: Path, rounds: int) -> None:
    paths = RunPaths(private_dir(root))
    barrier, told = FORK.Barrier(2), FORK.SimpleQueue()
    with processes(
        (contender, ("one", root, rounds, barrier, told)), (contender, ("two", root, rounds, barrier, told))
    ):
        results: dict[int, list[tuple[str, int, bool]]] = {}
        for _ in range(2 * rounds):
            number, *result = told.get()
            results.setdefault(number, []).append(tuple(result))
    for number, both in results.items():
        (winner, attempt, saved), (_, refused, harmed) = sorted(both, key=lambda one: -one[1])
        said = f"seed {SEED}, round {number}: {both}"
        assert (attempt, refused) == (number + 1, -Fenced.exit_code), said
        assert saved, said
        assert not harmed, said
        manifest = read_manifest(paths.checkpoint(number + 1))
        assert manifest.attempt == attempt, said
        assert verify(paths.checkpoint(number + 1)).ok
        assert winner in ("one", "two")
    owner = read_owner(paths)
    assert owner is not None
    assert owner.attempt == rounds
    assert list(paths.control.glob("*.tmp")) == []


@pytest.mark.scenario("C01")
def test_of_two_that_start_one_run_at_once_one_has_it_and_the_other_is_told_and_saves_nothing(
    tmp_path: Path,
) -> None:
    race(tmp_path / "run", 10)


@pytest.mark.soak
@pytest.mark.scenario("C01")
def test_of_two_that_start_one_run_at_once_many_times(tmp_path: Path) -> None:
    race(tmp_path / "run", MANY)


# ---- the agents of a dead lead, one successor


def orphan(root: Path, jobs: int, barrier: Any, told: Any) -> None:
    paths, config = RunPaths(root), parse_config(b"", "my.yaml")
    for number in range(jobs):
        barrier.wait(PATIENCE_S)
        told.put((number, asyncio.run(queue_successor(paths, config, str(100 + number)))))


def test_of_the_agents_of_a_dead_lead_one_queues_the_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, jobs = RunPaths(private_dir(tmp_path / "run")), 4
    private_dir(paths.logs)
    programs = tmp_path / "bin"
    programs.mkdir()
    # Each job gets a number of its own, and squeue, asked too early, knows of none.
    for name, text in (("sbatch", f"echo $$ | tee -a {tmp_path}/sent"), ("squeue", "")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    agents, told, barrier = 3, FORK.SimpleQueue(), FORK.Barrier(3)
    answers: dict[int, set[str]] = {}
    with processes(*[(orphan, (paths.root, jobs, barrier, told))] * agents):
        for _ in range(agents * jobs):
            number, answer = told.get()
            answers.setdefault(number, set()).add(answer)
    sent = (tmp_path / "sent").read_text().split()
    assert [len(said) for said in answers.values()] == [1] * jobs, "all name the same one"
    assert sorted(sent) == sorted(answer for said in answers.values() for answer in said)
    assert Counter(event["after"] for event in read_events(paths)) == {str(100 + n): 1 for n in range(jobs)}


# ---- everybody at once (C03)


def saver(paths: RunPaths, stop: Any, saves: int, seconds: float, seen: Any) -> None:
    """A trainer: saves, and lets older ones go; at least until everybody has done something beside it."""
    step, ends = 0, time.monotonic() + seconds
    late = ends + PATIENCE_S / 2
    while step < saves or (now := time.monotonic()) < ends or (now < late and not all(_counts(seen))):
        step += 1
        staging = stage(paths, step)
        commit(staging, manifest_of(staging), attempt_check=lambda: require_attempt(paths, 1))
        found = list_checkpoints(paths)
        newest = {info.name for info in found if info.step > step - 3}
        plan = plan_prune(found, 3, verified=newest, num_verified=2)
        apply_prune(paths, plan, attempt_check=lambda: require_attempt(paths, 1))
    stop.set()


def some(paths: RunPaths, stop: Any, dice: random.Random) -> Iterator[CheckpointInfo]:
    """One of those that are there now, until the saver has ended."""
    while not stop.is_set():
        found = [info for info in list_checkpoints(paths) if info.kind == "committed"]
        if found:
            yield dice.choice(found)


def verifier(paths: RunPaths, stop: Any, seen: Any) -> None:
    for info in some(paths, stop, random.Random(SEED + 1)):
        verdict = verify(info.path)
        if not verdict.ok:
            assert not info.path.exists(), f"seed {SEED}: {verdict.one_line()}"
        _count(seen, "verified", verdict.ok)


def scrubber(paths: RunPaths, stop: Any, seen: Any) -> None:
    for info in some(paths, stop, random.Random(SEED + 2)):
        found = scrub_one(info.path, set_aside=True)
        assert found.verdict.ok or found.gone, f"seed {SEED}: {found.verdict.one_line()}"
        _count(seen, "scrubbed", found.verdict.ok)


def restorer(paths: RunPaths, stop: Any, seen: Any, scratch: Path) -> None:
    """Copies a checkpoint out and holds the copy against its own manifest: whole, or gone, and never a mixture."""
    for info in some(paths, stop, random.Random(SEED + 3)):
        copy = scratch / info.name
        try:
            shutil.copytree(info.path, copy, symlinks=True)
            whole = True
        except (OSError, shutil.Error):
            assert not info.path.exists(), f"seed {SEED}: {info.name} is there and cannot be read"
            whole = False
        if whole and not (good := verify(copy)).ok:
            # What is being removed is listed shorter than it was; it never has other bytes.
            assert {problem.what.split(":")[0] for problem in good.problems} <= {"missing"}, good.one_line()
            assert not info.path.exists()
            whole = False
        shutil.rmtree(copy, ignore_errors=True)
        _count(seen, "restored", whole)


def replicator(paths: RunPaths, stop: Any, seen: Any, tiers: list[OpenTier]) -> None:
    while not stop.is_set():
        with contextlib.suppress(TierError):  # the other one has the lock
            done = sync(paths, config_of(), tiers=tiers)
            for one in done.done:
                gone = not (paths.checkpoints / one.action.name).exists()
                assert not one.problem or gone, f"seed {SEED}: {one}"
                _count(seen, "replicated", not one.problem)


def fetcher(paths: RunPaths, stop: Any, seen: Any, tiers: list[OpenTier], names: list[str]) -> None:
    """Brings back what was let go long ago, and is let go again."""
    dice = random.Random(SEED + 4)
    while not stop.is_set():
        try:
            fetch(paths, config_of(), dice.choice(names), tiers=tiers)
        except (NotFound, TierError, CheckpointCorrupt) as error:
            raise AssertionError(f"seed {SEED}: {error.one_line()}") from error
        _count(seen, "fetched", True)


def _count(seen: Any, what: str, good: bool) -> None:
    with seen[what].get_lock():
        seen[what].value += good


def _counts(seen: Any) -> list[int]:
    return [count.value for count in seen.values()]


def everybody(tmp_path: Path, saves: int, seconds: float) -> dict[str, int]:
    paths = RunPaths(private_dir(tmp_path / "run"))
    take_attempt(paths, job_id="1", restart=0)
    tiers = opened(paths, posix_config(tmp_path / "cold", kind="archive"))
    # Two from before are in the tier already, so that there is always something to be fetched.
    for step in (1, 2):
        staging = stage(paths, step)
        commit(staging, manifest_of(staging), attempt_check=lambda: None)
    assert sync(paths, config_of(), tiers=tiers).ok
    names = [info.name for info in list_checkpoints(paths)]
    stop = FORK.Event()
    tasks = ("verified", "scrubbed", "restored", "replicated", "fetched")
    seen = {what: FORK.Value("i", 0) for what in tasks}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with processes(
        (saver, (paths, stop, saves, seconds, seen)),
        (verifier, (paths, stop, seen)),
        (scrubber, (paths, stop, seen)),
        (restorer, (paths, stop, seen, scratch)),
        (replicator, (paths, stop, seen, tiers)),
        (replicator, (paths, stop, seen, tiers)),
        (fetcher, (paths, stop, seen, tiers, names)),
    ):
        assert stop.wait(seconds + PATIENCE_S), "the saver has locked itself up"
    assert sync(paths, config_of(), tiers=tiers).ok
    assert sweep(paths) == [], "nobody left anything half made or half removed"
    found = list_checkpoints(paths)
    assert all(info.kind == "committed" for info in found), found
    newest = max(found, key=lambda info: info.order)
    assert verify(newest.path).ok
    # What a copy has left that was given up goes in the pass after a newer one was verified (`tier_plan`, rule 6).
    assert sync(paths, config_of(), tiers=tiers).ok
    copies = Memory(paths).survey(tiers)[1].copies
    for copy in copies:
        assert copies_of(tiers[0]).problems(copy.name) == [], copy
    assert {info.name for info in found} <= {copy.name for copy in copies}
    failed = [event for event in read_events(paths) if event["event"] == "tier_failed"]
    assert not any(event["what"] == "fetch" for event in failed), failed
    parse((newest.path / "manifest.json").read_bytes(), where=newest.path)
    return {what: count.value for what, count in seen.items()} | {"steps": newest.step}


@pytest.mark.scenario("C03")
def test_saving_pruning_verifying_scrubbing_replicating_and_fetching_at_once_harm_nothing(
    tmp_path: Path,
) -> None:
    did = everybody(tmp_path, saves=15, seconds=0.0)
    assert min(did.values()) > 0, did


@pytest.mark.soak
@pytest.mark.scenario("C03")
def test_all_at_once_for_minutes(tmp_path: Path) -> None:
    did = everybody(tmp_path, saves=1, seconds=3.0 * MANY)
    print(did)
    assert min(did.values()) > 0, did
