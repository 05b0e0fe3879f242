"""A program that drives Ray, on all nodes of the job: actors on every node, and one loop that verl-slurm saves.

`verl-slurm submit configs/ray_program.yaml` runs it. Here actors estimate pi; yours sample, score or train.
"""

import argparse
import random
from itertools import cycle

import ray

import verl_slurm

THROWS = 2  # of each step, dealt out to the actors


class Total:
    """The state that lasts: a loop names what has `state_dict` and `load_state_dict`."""

    def __init__(self) -> None:
        self.inside = self.thrown = 0

    def state_dict(self) -> dict[str, int]:
        return {"inside": self.inside, "thrown": self.thrown}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.inside, self.thrown = state["inside"], state["thrown"]


@ray.remote(num_gpus=1)
class Thrower:
    """One on each of the job's GPUs, which Ray counts by `distributed.dp_size`."""

    def throw(self, seed: int, count: int) -> int:
        draw = random.Random(seed)  # noqa: S311 - no secret
        return sum(draw.random() ** 2 + draw.random() ** 2 < 1 for _ in range(count))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--count", type=int, default=100_000)
    options = parser.parse_args()
    ray.init()  # joins the Ray of the job
    throwers = [Thrower.remote() for _ in range(int(ray.cluster_resources()["GPU"]))]
    total = Total()
    # any_ranks: a step is the same on any number of nodes, so the job may lose some (`distributed.min_nodes`).
    with verl_slurm.run(any_ranks=True, total=total) as run:
        for step in run.steps(options.steps):
            # Seeds of the step, not of the actor: a step that is done again is the same step.
            seeds = range(step * THROWS, (step + 1) * THROWS)
            asked = [one.throw.remote(seed, options.count) for one, seed in zip(cycle(throwers), seeds)]
            total.inside += sum(ray.get(asked))
            total.thrown += options.count * THROWS
            run.log(pi=4 * total.inside / total.thrown)


if __name__ == "__main__":
    main()
