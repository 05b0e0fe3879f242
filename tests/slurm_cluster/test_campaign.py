"""One run, interrupted again and again at random moments in every way we know, ends with the weights of its twin.

`make campaign N=200` for a longer one, with a seed of its own; `CASES=all` (or names of `cases.CASES`) for other
algorithms, shapes and engines, and for ways that take whole nodes. The seed is printed; `VERL_SLURM_SEED=...` repeats
the choices. `VERL_SLURM_CAMPAIGN_RESULTS=FILE` keeps what was found: `benchmarks/campaign.py`.
"""

import os
import random
import subprocess
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from benchmarks import campaign
from tests.harness import LiveRun, same_weights
from tests.ledger_stats import LedgerStats, ledger_stats
from tests.loops.served import CONFIG, STEPS, by_hand, overrides as loop_overrides
from tests.slurm_cluster.cases import CASES, ELASTIC, ENVIRONMENT, settings
from tests.slurm_cluster.ways import ASIDE, ENVIRONMENT as ENVIRONMENT_WAYS, EVERY_WAY, WAYS, Mischief
from verl_slurm.runtime_state import ledger
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.timeout(0), pytest.mark.variant]

_SEED = 20261121
"""The same ways and pauses each time; the moments they fall on are the machine's. `make campaign` draws another."""
_STEPS_EACH = 2.2
"""Steps of training that one interruption leaves room for, on average."""
_PATIENCE_S = 900.0
"""For a sign of life. Four ranks that start vLLM on two busy cores take minutes."""


def _asked() -> list[str]:
    names = os.environ.get("VERL_SLURM_CASES") or "ppo"
    return list(CASES) if names == "all" else names.split(",")


def _ways(case: str) -> tuple[str, ...]:
    if case == ENVIRONMENT:
        return ENVIRONMENT_WAYS
    return EVERY_WAY if os.environ.get("VERL_SLURM_CASES") else WAYS


def _keep_whole_ledger(run: LiveRun) -> None:
    """A save in the first step: the ledger is pruned up to the oldest checkpoint that is kept, and all are."""
    run.wait_event("training", timeout_s=_PATIENCE_S)
    run.slurm("scancel", "-b", "-s", "USR1", run.job_id)
    saved = run.wait_event("saved", timeout_s=_PATIENCE_S)
    assert str(saved["name"]).startswith("step_000000_"), f"the first step was over too soon:\n{run.story()}"


@pytest.mark.long
@pytest.mark.parametrize("case", _asked())
def test_a_run_interrupted_at_random_moments_ends_bit_for_bit_like_its_twin(
    cluster: DevCluster, tmp_path: Path, case: str, request: pytest.FixtureRequest
) -> None:
    if "vllm" in case and find_spec("vllm") is None:
        pytest.skip("NOT RUN: no vLLM here; `make vllm`, then .venv-vllm/bin/python -m pytest")
    wanted = int(os.environ.get("VERL_SLURM_CAMPAIGN") or 4)
    seed = int(os.environ.get("VERL_SLURM_SEED") or _SEED)
    # Each case has choices of its own; of those of `make test` its seed says which they are.
    dice = random.Random(seed if case == "ppo" else f"{case} {seed}")
    print(f"\n{case}: campaign of {wanted} interruptions, VERL_SLURM_SEED={seed}")
    steps = max(8, round(_STEPS_EACH * wanted))
    overrides = settings(case, steps)
    began = time.monotonic()
    twin = LiveRun(cluster, tmp_path / "twin", *overrides).submit()
    try:
        _keep_whole_ledger(twin)
        twin.wait_end(timeout_s=_PATIENCE_S)
    finally:
        twin.cancel()
    twin_minutes = (time.monotonic() - began) / 60
    began = time.monotonic()
    run = LiveRun(cluster, _disk(request, tmp_path, case) / "run", *overrides).submit()
    mischief = Mischief(run, cluster, random.Random(f"victims {case} {seed}"))
    done: Counter[str] = Counter()
    aside: Counter[str] = Counter()
    try:
        _keep_whole_ledger(run)  # before that there is nobody to interrupt
        while done.total() < wanted:
            # Wait until training moves again; a restart that was already disturbed is not news.
            before = len(run.events("training"))
            way = dice.choice(_ways(case))
            time.sleep(dice.uniform(0.0, 3.0))  # the random moment itself
            if _finished(run):
                break
            now = run.status()
            print(f"  {done.total() + 1:3} {way:14} {now.get('step')} {now.get('phase')}", flush=True)
            if not mischief.do(way):
                continue
            if way in ASIDE:
                aside[way] += 1
                continue
            done[way] += 1
            if way in ENVIRONMENT_WAYS:
                _moves_on(run)
                continue
            run.wait(
                lambda before=before: len(run.events("training")) > before or _finished(run), _PATIENCE_S
            )
            mischief.mend()
        run.wait_end(timeout_s=_PATIENCE_S)
    finally:
        run.cancel()
        mischief.mend()
    assert done.total() >= wanted, f"the run was over after {done.total()} interruptions: give it more steps"
    if case == ELASTIC:
        used = [len(event["train"]) for event in run.events("nodes_chosen")]
        assert {1, 2} <= set(used), used
    else:
        same, said = same_weights(run.paths.root, twin.paths.root)
        assert same, f"seed {seed}: {said}\n{run.story()}"
    stats = _same_rollouts(run, twin, f"seed {seed}", of_the_same_weights=case != ELASTIC)
    print(
        f"  {done.total()} interruptions; {stats.rollouts} rollouts, {stats.tokens} tokens in the ledger, "
        + ("of the prompts of the twin, none twice" if case == ELASTIC else "as in the twin's, none twice")
    )
    if results := os.environ.get("VERL_SLURM_CAMPAIGN_RESULTS"):
        row = campaign.Row(
            case=case,
            seed=seed,
            interruptions=dict(sorted(done.items())),
            aside=dict(sorted(aside.items())),
            steps=steps,
            starts=len(run.events("restart")),
            restarts=len(run.events("started")) - 1,
            rollouts=stats.rollouts,
            tokens=stats.tokens,
            minutes=round((time.monotonic() - began) / 60, 1),
            twin_minutes=round(twin_minutes, 1),
            load=round(os.getloadavg()[2], 1),
        )
        campaign.add(Path(results), row)


def _same_rollouts(run: LiveRun, twin: LiveRun, what: str, *, of_the_same_weights: bool) -> LedgerStats:
    """The two ledgers hold the same from the first step on, in as many tokens; nothing is there twice.

    Args:
        of_the_same_weights: otherwise they hold responses to the same prompts.
    """
    ours, theirs = (ledger_stats(r.paths) for r in (run, twin))
    assert ours.duplicates == theirs.duplicates == (), f"{what}: generated twice\n{run.story()}"
    assert ours.problems == theirs.problems == (), what
    mine, others = (ledger.load(r.paths, from_step=0) for r in (run, twin))
    assert min(others)[0] == 0, "the twin's ledger was pruned: there is nothing to count"
    lacking = others.keys() - mine.keys()
    told = [one["text"] for one in run.events("warning") if "the ledger takes no rollouts" in one["text"]]
    # A full disk takes no record, and training goes on: these would have been sampled again by a start in between.
    assert not lacking or told, f"{what}: {sorted(lacking)} are not in the ledger"
    assert not mine.keys() - others.keys(), what
    for key, arrays in others.items():
        if key in lacking:
            continue
        assert mine[key].keys() == arrays.keys(), f"{what}: {key}"
        for name, array in arrays.items():
            if not of_the_same_weights and name not in ("sample_id", "prompt_ids"):
                continue
            np.testing.assert_array_equal(mine[key][name], array, err_msg=f"{what}: {key} {name}")
    assert ours.rollouts == theirs.rollouts or lacking, what
    assert ours.tokens == theirs.tokens or lacking or not of_the_same_weights, what
    return ours


def _moves_on(run: LiveRun) -> None:
    """Until the run is at another place than now; nothing may have kept it from training meanwhile."""

    def place() -> tuple[object, ...]:
        now = run.status()
        return now.get("step"), now.get("phase"), now.get("index")

    before = place()
    run.wait(lambda: place() != before or _finished(run), _PATIENCE_S)


def _disk(request: pytest.FixtureRequest, tmp_path: Path, case: str) -> Path:
    """A file system of the run's own, where storage is to fail."""
    if case != ENVIRONMENT:
        return tmp_path
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1g,nr_inodes=20k,mode=700", "t", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("NOT RUN: mounting a file system needs root")
    request.addfinalizer(lambda: subprocess.run(["umount", "-l", str(disk)], check=False))
    return disk


@pytest.mark.long
@pytest.mark.scenario("FLT-A", "FLT-B", "FLT-H")
def test_a_plain_loop_whose_environment_fails_ends_with_the_weights_of_its_twin(
    cluster: DevCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    wanted = int(os.environ.get("VERL_SLURM_CAMPAIGN") or 2)
    dice = random.Random(int(os.environ.get("VERL_SLURM_SEED") or _SEED))
    loop = loop_overrides(60.0 * wanted / STEPS)
    root = _disk(request, tmp_path, ENVIRONMENT) / "run"
    run = LiveRun(cluster, root, *loop, config=str(CONFIG)).submit()
    mischief = Mischief(run, cluster, dice)
    try:
        run.wait_event("training", timeout_s=_PATIENCE_S)
        for _ in range(wanted):
            time.sleep(dice.uniform(0.0, 3.0))  # the random moment itself
            if _finished(run) or not mischief.do(way := dice.choice(ENVIRONMENT_WAYS)):
                break
            print(f"  {way}", flush=True)
            _moves_on(run)
        run.wait_end(timeout_s=_PATIENCE_S)
    finally:
        run.cancel()
    same, said = same_weights(by_hand(tmp_path / "straight"), run.paths.root)
    assert same, f"{said}\n{run.story()}"


def _finished(run: LiveRun) -> bool:
    ended = run.events("ended")
    return bool(ended) and ended[-1]["exit_code"] == 0
