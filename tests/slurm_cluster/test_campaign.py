"""One run, interrupted again and again at random moments in every way we know, ends with the weights of its twin.

`make campaign N=200` for a longer one, with a seed of its own; `CASES=all` (or names of `_CASES`) for other algorithms,
shapes and engines. The seed is printed; `VERL_SLURM_SEED=...` repeats the choices.
"""

import os
import random
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.harness import SMALL, LiveRun, same_weights
from verl_slurm.devcluster.cluster import DevCluster
from verl_slurm.devcluster.faults import preempt
from verl_slurm.runtime_state import ledger

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.timeout(0)]

_WAYS = ("preempt", "requeue", "save", "kill_rank", "kill_rank", "kill_node", "kill_lead_node")
_SEED = 20261121
"""The same ways and pauses each time; the moments they fall on are the machine's. `make campaign` draws another."""
_STEPS_EACH = 1.2
"""Steps of training that one interruption leaves room for, on average."""


_GRPO = ("train.algorithm=grpo", "rollout.samples_per_prompt=4")
_TP = ("distributed.dp_size=1", "distributed.tp_size=2")
_GRID = ("distributed.dp_size=2", "distributed.tp_size=2")
# A pipeline of two wants two micro-batches to an update.
_PP = ("distributed.dp_size=1", "distributed.pp_size=2", "train.micro_batch_size_per_device=8")
_VLLM = ("rollout.engine=vllm", "model.path=builtin:tiny32")
_CASES = {
    "ppo": (),
    "ppo-tp": _TP,
    "ppo-2x2": _GRID,
    "ppo-pp": _PP,
    "grpo": _GRPO,
    "grpo-tp": (*_GRPO, *_TP),
    "grpo-2x2": (*_GRPO, *_GRID),
    "grpo-pp": (*_GRPO, *_PP),
    "ppo-vllm": _VLLM,
    "grpo-vllm": (*_GRPO, *_VLLM),
}


def _asked() -> list[str]:
    names = os.environ.get("VERL_SLURM_CASES") or "ppo"
    return list(_CASES) if names == "all" else names.split(",")


def _interrupt(run: LiveRun, way: str, cluster: DevCluster) -> bool:
    """Disturb the run; False where there was nobody to disturb at this moment."""
    batch_host, victims = run.facts().batch_host, []
    if batch_host is None:
        return False
    match way:
        case "preempt":
            preempt(cluster, int(run.job_id), hold_s=1)
        case "requeue":
            run.slurm("scontrol", "requeue", run.job_id)
        case "save":
            run.slurm("scancel", "-b", "-s", "USR1", run.job_id)
        case "kill_rank":
            victims = run.ranks()[-1:]
        case "kill_node":
            others = run.other_nodes()
            victims = run.processes(others[0]) if others else []
        case "kill_lead_node":
            victims = run.processes(batch_host)
    if way.startswith("kill") and not victims:
        return False
    if victims:
        run.kill(victims)
    return True


@pytest.mark.parametrize("case", _asked())
def test_a_run_interrupted_at_random_moments_ends_bit_for_bit_like_its_twin(
    cluster: DevCluster, tmp_path: Path, case: str
) -> None:
    if case.endswith("vllm") and find_spec("vllm") is None:
        pytest.skip("NOT RUN: no vLLM here; `make vllm`, then .venv-vllm/bin/python -m pytest")
    wanted = int(os.environ.get("VERL_SLURM_CAMPAIGN") or 25)
    seed = int(os.environ.get("VERL_SLURM_SEED") or _SEED)
    dice = random.Random(seed)
    print(f"\n{case}: campaign of {wanted} interruptions, VERL_SLURM_SEED={seed}")
    steps = max(8, round(_STEPS_EACH * wanted))
    overrides = (
        *SMALL,
        *_CASES[case],
        f"train.steps={steps}",
        "train.batch_size_per_device=128",
        "checkpoint.every_steps=2",
        "checkpoint.runtime_every_steps=2",
        "daemon.crash_budget=1000",
        "daemon.requeue_delay_s=1",
        "daemon.backoff_s=0.05",
        "daemon.no_progress_limit=1000",
        "slurm.time_limit_min=1000",
        "checkpoint.keep_last=1000",  # nothing is pruned from the ledger, so that it can be counted at the end
    )
    twin = LiveRun(cluster, tmp_path / "twin", *overrides).submit()
    twin.wait_end()
    run = LiveRun(cluster, tmp_path / "run", *overrides).submit()
    done: list[str] = []
    try:
        run.wait_event("training")  # before that there is nobody to interrupt
        while len(done) < wanted:
            # Wait until training moves again; a generation that was already disturbed is not news.
            before = len(run.events("training"))
            way = dice.choice(_WAYS)
            time.sleep(dice.uniform(0.0, 3.0))  # the random moment itself
            if run.events("ended") and run.events("ended")[-1]["exit_code"] == 0:
                break
            print(
                f"  {len(done) + 1:3} {way:14} {run.status().get('step')} {run.status().get('phase')}",
                flush=True,
            )
            if not _interrupt(run, way, cluster) or way == "save":  # a save is on top: it interrupts nothing
                continue
            done.append(way)
            run.wait(lambda before=before: len(run.events("training")) > before or _finished(run))
        run.wait_end(timeout_s=300)
    finally:
        run.cancel()
    assert len(done) >= wanted, f"the run was over after {len(done)} interruptions: give it more steps"
    same, said = same_weights(run.paths.root, twin.paths.root)
    assert same, f"seed {seed}: {said}\n{run.story()}"
    stats = ledger.stats(run.paths)
    assert stats.duplicates == (), f"seed {seed}: generated twice"
    # The ledger is pruned up to the oldest checkpoint; behind the twin's, the two must hold the same rollouts.
    oldest = min(step for step, _ in ledger.load(twin.paths, from_step=0))
    ours, theirs = (ledger.load(r.paths, from_step=oldest) for r in (run, twin))
    assert ours.keys() == theirs.keys(), f"seed {seed}"
    for key, arrays in theirs.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(ours[key][name], array, err_msg=f"seed {seed}: {key} {name}")
    print(
        f"  {len(done)} interruptions; {stats.rollouts} rollouts, {stats.tokens} tokens in the ledger, none twice"
    )


def _finished(run: LiveRun) -> bool:
    ended = run.events("ended")
    return bool(ended) and ended[-1]["exit_code"] == 0
