"""Where the design bends: the goodput of a run from 1 to 4,096 nodes, simulated.

    python benchmarks/plan_scale.py [--to DIR] [--json]

Nothing here was measured at such sizes. The simulation (`verl_slurm.plan`) is the one that docs/plan.md compares with
real runs of two nodes. What it is given for large ones is `_RUN`: a PPO step of four minutes, half of it sampling,
10 GB of state a node, a save at the best interval of eight, restarts of two minutes, ten minutes in the queue.

Three questions, a picture each (DIR/plan-*.svg):

* failures: nodes lost 2.34, 6.5 and 20 times in a thousand days, with spare nodes (one in 64, at least one) or none;
* storage: one file system of 5, 50 or 500 GB/s for the whole run, 6.5 losses;
* storm: so many runs of 8 nodes are preempted in one moment, twice a day, with 60 s of grace; their emergency saves and
  their starts share one file system.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec

from benchmarks.curves import lines
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.plan.plan_inputs import schedule_of
from verl_slurm.plan.simulate import RunModel, random_strikes, simulate

_DAY_S = 86400.0
_NODE_BYTES = 10e9
_SIZES = [2**power for power in range(13)]
_INTERVALS = (1, 2, 3, 5, 8, 12, 20, 30)
_SEEDS = 12
_BENT = 0.9
_RUN = RunModel(
    steps=1000,
    step_s=240.0,
    sampling_share=0.5,
    replay_cost=0.05,
    margin_s=3.0,
    leave_s=1.0,
    queue_s=(600.0,),
    first_start_s=120.0,
    start_s=120.0,
    in_place_s=120.0,
    standby_s=120.0,
    spare_s=120.0,
    lost_node_s=300.0,
    finish_s=60.0,
)


def goodput(model: RunModel) -> float:
    """Returns the mean goodput at the best interval."""
    return max(_mean(model, every) for every in _INTERVALS)


def _mean(model: RunModel, every: int) -> float:
    schedule = schedule_of(CheckpointConfig(every_steps=every, runtime_every_steps=every), model)
    found = []
    for seed in range(_SEEDS):
        strikes = random_strikes(model, random.Random(f"strikes {seed}"))
        outcome = simulate(model, schedule, strikes, random.Random(f"waits {seed}"))
        found.append(outcome.goodput if outcome.finished else 0.0)
    return fmean(found)


def _saving(model: RunModel, bytes_per_s: float, runs: int = 1) -> RunModel:
    seconds = _NODE_BYTES * model.nodes * runs / bytes_per_s
    alone = seconds / runs
    return msgspec.structs.replace(
        model,
        durable_s=alone,
        save_s=0.1 * alone,
        emergency_s=2.0 * seconds + 1.0,
        start_s=model.start_s + seconds,
        in_place_s=model.in_place_s + alone,
        standby_s=model.standby_s + alone,
        spare_s=model.spare_s + alone,
    )


def failing(nodes: int, per_thousand: float, *, spares: bool) -> RunModel:
    """Of one run whose storage is no limit."""
    model = msgspec.structs.replace(
        _RUN,
        nodes=nodes,
        spare_nodes=max(nodes // 64, 1) if spares and nodes > 1 else 0,
        losses_per_node_s=per_thousand / 1000.0 / _DAY_S,
    )
    return _saving(model, 1e9 * nodes)


def stored(nodes: int, gb_per_s: float) -> RunModel:
    return _saving(failing(nodes, 6.5, spares=True), gb_per_s * 1e9)


def storming(runs: int, gb_per_s: float) -> RunModel:
    model = msgspec.structs.replace(_RUN, nodes=8, warning_s=60.0, notices_per_s=2.0 / _DAY_S)
    return _saving(model, gb_per_s * 1e9, runs)


_QUESTIONS: dict[str, tuple[str, str, dict[str, Callable[[int], RunModel]]]] = {
    "failures": (
        "Goodput as nodes fail",
        "nodes that train, as a power of two",
        {
            "2.34 losses in 1,000 node days, spare nodes": lambda n: failing(n, 2.34, spares=True),
            "6.5, spare nodes": lambda n: failing(n, 6.5, spares=True),
            "20, spare nodes": lambda n: failing(n, 20.0, spares=True),
            "6.5, none": lambda n: failing(n, 6.5, spares=False),
        },
    ),
    "storage": (
        "Goodput as storage is shared by more nodes, 10 GB of state each",
        "nodes that train, as a power of two",
        {
            "500 GB/s": lambda n: stored(n, 500.0),
            "50 GB/s": lambda n: stored(n, 50.0),
            "5 GB/s": lambda n: stored(n, 5.0),
        },
    ),
    "storm": (
        "Goodput as more runs of 8 nodes are preempted in one moment, 60 s of grace",
        "runs, as a power of two",
        {
            "500 GB/s": lambda n: storming(n, 500.0),
            "50 GB/s": lambda n: storming(n, 50.0),
            "5 GB/s": lambda n: storming(n, 5.0),
        },
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("docs"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for question, (title, x, curves) in _QUESTIONS.items():
        found[question] = {
            name: [round(goodput(model_of(size)), 4) for size in _SIZES] for name, model_of in curves.items()
        }
        drawn = {
            name: [(float(power), 100.0 * value) for power, value in enumerate(values)]
            for name, values in found[question].items()
        }
        picture = lines(drawn, title=title, x=x, y="goodput, percent", top=100.0)
        (options.to / f"plan-{question}.svg").write_text(picture)
    if options.json:
        print(json.dumps(found))
        return 0
    for question, curves_ in found.items():
        print(question)
        for name, values in curves_.items():
            bends = next((size for size, value in zip(_SIZES, values, strict=True) if value < _BENT), None)
            shown = " ".join(f"{value:.3f}" for value in values)
            print(f"  {name:<45} below {_BENT} from {bends or 'none'}: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
