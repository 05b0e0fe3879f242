"""A rank that stands by: its imports are done, it has no number yet, and it sleeps until its launcher says what to run.

    python -P -m verl_slurm.rendezvous.standby MODULES...

What it is to become comes through its standard input (`wire.orders`). If that ends without any, so does this process.
It has not touched a device: a process that has initialised CUDA does not wait.
"""

import importlib
import os
import sys

from verl_slurm.rendezvous.install import install_on_import
from verl_slurm.rendezvous.start import start
from verl_slurm.wire.lifeline import die_with_launcher
from verl_slurm.wire.orders import Orders

__all__ = ["stand_by"]


def stand_by(modules: list[str]) -> None:
    """Imports the modules, waits for orders, and becomes that rank."""
    # First: a process whose launcher is gone must not be left behind.
    die_with_launcher()
    # Before anything imports torch: its groups are checked from the first one on.
    install_on_import()
    for name in modules:
        importlib.import_module(name)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        sys.stderr.write("verl-slurm: an import initialised CUDA: this process does not stand by\n")
        os._exit(1)
    data = sys.stdin.buffer.read()
    if not data:
        os._exit(0)
    orders = Orders.read(data)
    # As a rank that is started at once: with nothing to read.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(orders.variables())
    sys.argv[1:] = orders.words()
    start()


if __name__ == "__main__":
    stand_by(sys.argv[1:])
