"""What an interruption of verl's sampling costs, with and without verl-slurm's ledger, in one run.

    .venv-verl-vllm/bin/python benchmarks/verl_interruptions.py [--step-s 300] [--json]

GRPO of verl with real vLLM on the CPU, as a job of an embedded Slurm with a grace time of 30 s:

* preempted: halfway through a step whose sampling takes `--step-s` seconds. The engine pauses before each linear layer,
  and counts those layers, so the passes that were computed twice are known: they are the seconds of sampling that are
  lost. Once with the ledger, once with verl's own manager in its place.
* engine: the process of the rollout engine is killed in mid-rollout; then verl's driver, so that all starts anew.
  Measured from the kill to the next token.

Starting verl and loading the model again is not sampling: it is told beside it, as `restart_s`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.slurm_cluster.verl_runs import end, one
from tests.slurm_cluster.vllm_runs import LINEARS, SESSIONS, environment, logged, make_run, wait_for_tokens
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.conf import ClusterOptions
from verl_slurm.slurm.devcluster.faults import preempt

LENGTH = 300
NO_LEDGER = {
    "++actor_rollout_ref.rollout.agent.agent_loop_manager_class": "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ"
}
PATIENCE_S = 3600.0


def _passes(counted: Path) -> float:
    """Forward passes of the engines since the start of the benchmark, in the warm-up of each included."""
    return counted.stat().st_size / LINEARS if counted.exists() else 0.0


def preempted(cluster: DevCluster, place: Path, pass_s: float, *, ledger: bool) -> dict[str, float]:
    """Returns the seconds of sampling that were lost, and those between the last pass and the next."""
    counted = place / "layers"
    os.environ |= {"VERL_TEST_LINEAR_S": str(pass_s / LINEARS), "VERL_TEST_LINEARS": str(counted)}
    run = make_run(cluster, place, length=LENGTH, **({} if ledger else NO_LEDGER))
    run.submit()
    try:
        run.wait_event("training", timeout_s=PATIENCE_S)
        # vLLM has warmed up by now.
        first = _passes(counted)
        while _passes(counted) - first < LENGTH / 2:
            time.sleep(0.1)
        seen = len(run.events())
        preempt(cluster, int(run.job_id), hold_s=1)
        run.wait_event("ended", after=seen, timeout_s=PATIENCE_S)
        done, stopped = _passes(counted) - first, time.monotonic()
        run.wait_event("training", after=seen, timeout_s=PATIENCE_S)
        again, restarted = _passes(counted), time.monotonic()
        run.wait_end(timeout_s=PATIENCE_S)
        lost = done + _passes(counted) - again - LENGTH
    finally:
        end(run)
    return {"lost_s": round(lost * pass_s, 1), "restart_s": round(restarted - stopped, 1)}


def engine(cluster: DevCluster, place: Path) -> dict[str, float]:
    """Returns the seconds without a new token after the engine is killed, and after the driver is."""
    os.environ |= {"VERL_TEST_LINEAR_S": "0.01"}
    run = make_run(cluster, place, length=LENGTH).submit()
    figures: dict[str, float] = {}
    try:
        for name, word, tokens in (("engine_s", "LoggedServer", 20), ("driver_s", "TaskRunner", 100)):
            wait_for_tokens(run, tokens)
            process, had = one(run, word), sum(count for _, _, count in logged(run))
            process.kill()
            killed = time.monotonic()
            # What the last quarter of a second had logged is not new.
            wait_for_tokens(run, had / SESSIONS + 1)
            figures[name] = round(time.monotonic() - killed, 1)
        run.wait_end(timeout_s=PATIENCE_S)
    finally:
        end(run)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-s", type=float, default=300.0, help="seconds of sampling in the step")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ |= environment()
    figures: dict[str, Any] = {"step_s": options.step_s, "grace_s": 30}
    with tempfile.TemporaryDirectory(prefix="vs-") as name:
        cluster = DevCluster(Path(name) / "c")
        try:
            cluster.start(ClusterOptions(grace_s=30))
            for word, ledger in (("with the ledger", True), ("without", False)):
                place = Path(name) / word.split()[0]
                figures[word] = preempted(cluster, place, options.step_s / LENGTH, ledger=ledger)
                print(word, figures[word], file=sys.stderr, flush=True)
            figures["killed"] = engine(cluster, Path(name) / "killed")
        finally:
            cluster.stop()
    if options.json:
        print(json.dumps(figures))
    else:
        for each, found in figures.items():
            print(f"{each}: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
