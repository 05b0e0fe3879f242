"""Does a run whose nodes come and go learn as an undisturbed one? Several seeds of each, on an embedded cluster.

    python benchmarks/elastic_learning.py [--seeds 8] [--json FILE] [--lock FILE] [KEY=VALUE ...]

Each seed trains the quick start twice: undisturbed on two nodes, and with `distributed.min_nodes: 1`: a node is lost at
step 3 (two nodes, then one), the job is requeued at step 10 (two again, if Slurm has both by then), and a node is lost
at step 16 (one until the end). Prompts and batch are those of the undisturbed run. Rounding differs with the number of
ranks, so single responses may, too; so what is compared is the mean reward of the last quarter of all steps, in pairs
by seed: the mean of the differences with its 95 % interval (bootstrap), an exact sign-flip test, and the spread over
seeds beside it.
"""

import argparse
import fcntl
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.harness import LiveRun
from verl_slurm.config.load import load_resolved
from verl_slurm.journal.steps import last_steps
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.conf import ClusterOptions
from verl_slurm.slurm.devcluster.faults import fail_node, restore_node

_FIRST_LOSS, _REQUEUE, _SECOND_LOSS = 3, 10, 16
"""After so many steps; the quick start has 24."""


def rewards(run: LiveRun) -> list[float]:
    """Returns the mean reward of each step, from the first to the last."""
    steps = load_resolved(run.paths.run_yaml).train.steps
    rows = last_steps(run.paths, steps)
    assert [row["step"] for row in rows] == list(range(1, steps + 1)), "a step is missing, or there twice"
    return [row["reward"] for row in rows]


def undisturbed(cluster: DevCluster, root: Path, seed: int, more: Sequence[str]) -> list[float]:
    run = LiveRun(cluster, root, f"seed={seed}", *more).submit()
    run.wait_end()
    return rewards(run)


def elastic(cluster: DevCluster, root: Path, seed: int, more: Sequence[str]) -> list[float]:
    settings = (f"seed={seed}", "distributed.min_nodes=1", "daemon.standby_after_s=null", *more)
    run = LiveRun(cluster, root, *settings).submit()

    def lose_one(after: int) -> str | None:
        run.wait(lambda: run.status().get("step", 0) >= after)
        chosen = run.events("nodes_chosen")[-1]["train"]
        if len(chosen) == 1:
            # Slurm started the job again before it had the other node back: a change of another kind.
            return None
        before = len(run.events("training"))
        fail_node(cluster, chosen[1])
        run.wait(lambda: len(run.events("training")) > before)
        assert run.events("nodes_chosen")[-1]["train"] == chosen[:1], "it goes on without that node"
        return str(chosen[1])

    lost = lose_one(_FIRST_LOSS)
    assert lost is not None, "the first attempt has both nodes"
    run.wait(lambda: run.status()["step"] >= _REQUEUE)
    restore_node(cluster, lost, timeout_s=120)
    run.slurm("scontrol", "requeue", run.job_id)
    run.wait_event("started", requeues=1)
    lost = lose_one(_SECOND_LOSS)
    run.wait_end()
    if lost is not None:
        restore_node(cluster, lost, timeout_s=120)
    shapes = [len(event["train"]) for event in run.events("nodes_chosen")]
    print(f"seed {seed}  nodes that trained, one start after the other: {shapes}", flush=True)
    return rewards(run)


def compared(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Returns the mean difference of pairs, its 95 % interval, and how likely one so large is by chance."""
    pairs = [after - before for before, after in zip(first, second, strict=True)]
    draws = random.Random(0)
    means = sorted(statistics.mean(draws.choices(pairs, k=len(pairs))) for _ in range(10_000))
    # Exact: with no difference each sign would be as likely as the other.
    signs = itertools.product((1, -1), repeat=len(pairs))
    flips = [abs(sum(pair * sign for pair, sign in zip(pairs, flipped, strict=True))) for flipped in signs]
    p = sum(flip >= abs(sum(pairs)) - 1e-12 for flip in flips) / len(flips)
    return {"difference": statistics.mean(pairs), "low": means[250], "high": means[9750], "p": p}


@contextmanager
def _alone(lock: Path | None) -> Iterator[None]:
    """Holds `lock`, if there is one, so that other work of this machine waits."""
    if lock is None:
        yield
        return
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lock", type=Path, help="held during each run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for every run")
    options = parser.parse_intermixed_args(argv)
    found: dict[str, list[list[float]]] = {"undisturbed": [], "elastic": []}
    with tempfile.TemporaryDirectory(prefix="vs-") as name:
        cluster = DevCluster(Path(name) / "c")
        try:
            cluster.start(ClusterOptions())
            for seed in range(options.seeds):
                for kind, train in (("undisturbed", undisturbed), ("elastic", elastic)):
                    with _alone(options.lock):
                        found[kind].append(
                            train(cluster, Path(name) / f"{kind}{seed}", seed, options.overrides)
                        )
                    last = statistics.mean(_late(found[kind][-1]))
                    print(f"seed {seed}  {kind:12} {last:.4f}", flush=True)
                    if options.json:
                        options.json.write_text(json.dumps(found))
        finally:
            cluster.stop()
    late = {kind: [statistics.mean(_late(run)) for run in runs] for kind, runs in found.items()}
    for kind, means in late.items():
        print(f"{kind:12} mean {statistics.mean(means):.4f}, over seeds ± {statistics.stdev(means):.4f}")
    numbers = compared(late["undisturbed"], late["elastic"])
    print("difference {difference:+.4f}, 95 %: {low:+.4f} to {high:+.4f}, p = {p:.2f}".format(**numbers))
    if options.json:
        options.json.write_text(json.dumps(found | numbers, indent=1) + "\n")
    return 0


def _late(rewards: Sequence[float]) -> Sequence[float]:
    return rewards[-math.ceil(len(rewards) / 4) :]


if __name__ == "__main__":
    sys.exit(main())
