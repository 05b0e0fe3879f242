"""Python imports this at the start of each process below Ray, before any program of it: `rendezvous.everywhere`.

PYTHONPATH holds this directory (`ray_nodes`). Python continues if a `sitecustomize` raises, so a failure here
ends the process: it would otherwise talk to strangers.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

try:
    from verl_slurm.loops.rendezvous.everywhere import install_everywhere
    from verl_slurm.wire.hang_records import answer_with_stacks

    install_everywhere()
    # At a hang the daemon asks workers and engines, too, and not the driver alone.
    answer_with_stacks()
except BaseException as error:  # noqa: BLE001
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.stderr.flush()
    os._exit(1)

# The environment's own sitecustomize, which this one hides.
_spec = PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if path != os.path.dirname(__file__)]
)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
