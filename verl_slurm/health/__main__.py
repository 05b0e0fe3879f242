"""Looks at this node: `python -P -m verl_slurm.health ORDER`, a process that may hang in place of an agent.

Prints one JSON line `{"begins": CHECK}` before each check, and at last one line with a list of `Finding`. An agent that
loses patience judges by the check that had begun.
"""

import os
import sys

import msgspec

from verl_slurm.health.gpus import look_at_gpus
from verl_slurm.health.nodes import look_at_mounts, look_at_room


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The checks that are wanted."""

    gpus: bool
    gpus_required: bool = False
    foreign_processes: bool = True
    min_free_mb: int = 0
    places: tuple[str, ...] = ()


def main(order: Order) -> int:
    def begins(check: str) -> None:
        _print({"begins": check})

    found = look_at_room(begins, order.min_free_mb) + look_at_mounts(begins, order.places)
    if order.gpus:
        found += look_at_gpus(
            begins, os.environ, required=order.gpus_required, foreign=order.foreign_processes
        )
    _print(found)
    return 0


def _print(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Order)))
