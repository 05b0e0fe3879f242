"""verl-slurm: RL post-training that survives what a Slurm cluster does to it.

`verl_slurm.submit` and `verl_slurm.Run` are the Python interface (docs/python.md). `verl_slurm.run` is the door for a
training loop of one's own (docs/guests.md). `__init__.pyi` has their types.

This file imports nothing: what it imported would reach the daemon, which must stay small, and would be looked for in
the working directory where PYTHONPATH names it (`search_path`). Each name is loaded when it is asked for.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

# By their names alone: a line that imports them would make torch a need of everything that imports this package.
_DOORS = {
    "run": "verl_slurm.loops.plain",
    "Run": "verl_slurm.api",
    "RunStatus": "verl_slurm.api",
    "submit": "verl_slurm.api",
}


def __getattr__(name: str) -> "Any":
    if name in _DOORS:
        import importlib

        return getattr(importlib.import_module(_DOORS[name]), name)
    raise AttributeError(f"module 'verl_slurm' has no attribute {name!r}")
