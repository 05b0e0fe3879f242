"""A rank that stands by: its imports are done, it has no number yet, and it sleeps until its launcher says what to run.

    python -P -m verl_slurm.rendezvous.standby IMPORTS

It imports what the ranks before it have imported (`wire.imports`, the file IMPORTS). What it is to become comes through
its standard input (`wire.orders`). If that ends without any, so does this process. It has not touched a device: a
process that has initialised CUDA does not wait. Where a module has read a variable that now has another value, all
begins anew.
"""

import os
import sys
from pathlib import Path

from verl_slurm.rendezvous.install import install_on_import
from verl_slurm.rendezvous.rank_start import start
from verl_slurm.wire.imports import WatchedEnvironment, import_all
from verl_slurm.wire.lifeline import die_with_launcher
from verl_slurm.wire.orders import Orders


def stand_by(imports: Path) -> None:
    """Imports, waits for orders, and becomes that rank."""
    # First: a process whose launcher is gone must not be left behind.
    die_with_launcher()
    # Before anything imports torch: its groups are checked from the first one on.
    install_on_import()
    watched = WatchedEnvironment()
    with watched:
        import_all(imports)
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
    environ, words = orders.variables(), orders.words()
    if differing := watched.differing(environ):
        sys.stderr.write(
            f"verl-slurm: an import has read {', '.join(differing)}, now another: it is made anew\n"
        )
        command = [sys.executable, "-P", "-m", "verl_slurm.rendezvous", *words]
        os.execve(sys.executable, command, environ)  # noqa: S606 - as our launcher starts a rank
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = words
    start()


if __name__ == "__main__":
    stand_by(Path(sys.argv[1]))
