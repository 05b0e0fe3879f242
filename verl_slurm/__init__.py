"""verl-slurm: RL post-training that survives what a Slurm cluster does to it.

This file imports nothing: what it imported would reach the daemon, which must stay small, and would be looked for in
the working directory where PYTHONPATH names it (`search_path`). `verl_slurm.run`,
the door for a training loop of one's own (docs/guests.md), is loaded when it is asked for.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> "Any":
    if name == "run":
        import importlib

        # By its name alone: a line that imports it would make torch a need of everything that imports this package.
        return importlib.import_module("verl_slurm.loops.plain").run
    raise AttributeError(f"module 'verl_slurm' has no attribute {name!r}")
