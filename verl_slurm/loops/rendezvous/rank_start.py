"""Installs the run's rendezvous below torch's (`install`), and then becomes the program that it was started with.

`__main__`, sys.argv and tracebacks are those of `python PROGRAM ARGS...` or `python -m PROGRAM ARGS...`.

    python -P -m verl_slurm.loops.rendezvous [-m] PROGRAM ARGS...
    python -P -m verl_slurm.loops.rendezvous --imports IMPORTS

The second form is a rank that stands by: it imports what the ranks before it have imported
(`wire.standing_by`, the file IMPORTS), has no number yet, and sleeps until its launcher says through standard
input what to run. If that ends without orders, so does this process. Where a module has read a variable that
now has another value, all begins anew.
"""

import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from verl_slurm.base.errors import WireError
from verl_slurm.base.search_path import PYTHONPATH
from verl_slurm.loops.rendezvous.install import after_import, install_on_import, reach_children
from verl_slurm.wire.client import RankClient
from verl_slurm.wire.environment import CONTROL_VARIABLE, RUN_VARIABLE, SEARCH_VARIABLE
from verl_slurm.wire.lifeline import die_with_launcher
from verl_slurm.wire.messages import RankStarted
from verl_slurm.wire.standing_by import Orders, WatchedEnvironment, import_all

_OURS = (__file__, str(Path(__file__).with_name("__main__.py")), runpy.__file__, "<frozen runpy>")


def start() -> None:
    """Runs the program that sys.argv names."""
    # First: a launcher that dies now must not leave a rank behind.
    die_with_launcher()
    # Before anything imports torch: its groups are checked from the first one on.
    install_on_import()
    after_import("torch.utils.data._utils.signal_handling", _keep_workers)
    after_import("datasets.iterable_dataset", _begin_passes_anew)
    reach_children()
    if sys.argv[1] == "--imports":
        _stand_by(Path(sys.argv[2]))
    _tell_that_it_begins()
    sys.excepthook = _show_the_programs_frames
    if sys.argv[1] == "-m":
        del sys.argv[:2]
        # Not run_module: the program has to be `__main__` in sys.modules.
        runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
    else:
        del sys.argv[0]
        _become(sys.argv[0])


def _tell_that_it_begins() -> None:
    """Tells the daemon that a rank of a guest's lives, before its program does."""
    environ = os.environ
    # Our own trainer speaks at once. A service has no run, and a driver on Ray no rank: its node has spoken.
    if not {CONTROL_VARIABLE, RUN_VARIABLE, "RANK"} <= environ.keys():
        return
    # From here on `daemon.load_timeout_s` counts: a program may prepare its data for long before it speaks.
    # Where no agent answers, the program's own session says so.
    with suppress(OSError, WireError):
        line = RankClient.connect(Path(environ[CONTROL_VARIABLE]))
        line.send(RankStarted(rank=int(environ["RANK"]), pid=os.getpid(), by_program=False))
        line.close()


def _keep_workers(handling: ModuleType) -> None:
    """Has the worker processes of torch's data loaders outlive Slurm's warnings, as their rank does."""
    set_handlers = getattr(handling, "_set_worker_signal_handlers", None)
    if set_handlers is None:
        sys.stderr.write(
            "verl-slurm: this torch's data loaders may lose their workers to a SIGTERM of Slurm's\n"
        )
        return

    def wait() -> None:
        # A loader ends its workers by this signal, Slurm (`KillWait`, a grace time) tells each process of a step.
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    def set_and_block() -> None:
        # torch's own handler ends the worker, by any sender: the rank would fail in the step that is to be saved.
        set_handlers()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=wait, daemon=True).start()

    handling._set_worker_signal_handlers = set_and_block  # type: ignore[attr-defined]


def _begin_passes_anew(streams: ModuleType) -> None:
    """Has the first pass of a stream alone begin where its state was loaded."""
    passes = streams.IterableDataset.__iter__

    def begin(stream: Any) -> Iterator[object]:
        began = getattr(stream, "_starting_state_dict", None)
        yield from passes(stream)
        # Otherwise (datasets 5.2) each later one begins there, too, and the rows before it never come again.
        if began is not None and stream._starting_state_dict is began:
            stream._starting_state_dict = None

    streams.IterableDataset.__iter__ = begin


def _stand_by(imports: Path) -> None:
    """Imports, waits for orders, and takes over what they say."""
    watched = WatchedEnvironment()
    with watched:
        import_all(imports)
    torch = sys.modules.get("torch")
    # A process that has initialised CUDA does not wait.
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
        command = [sys.executable, "-P", "-m", "verl_slurm.loops.rendezvous", *words]
        os.execve(sys.executable, command, environ)  # noqa: S606 - as our launcher starts a rank
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = words


def _become(path: str) -> None:
    # First, as `python PROGRAM` does, and not before our own imports: they would find a `json.py` that lies there.
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    # For the Python processes that it starts: PYTHONSAFEPATH keeps each of them from its own directory.
    inherited = os.environ.get(PYTHONPATH, "")
    os.environ.setdefault(SEARCH_VARIABLE, inherited)
    os.environ[PYTHONPATH] = os.pathsep.join(
        filter(None, [inherited, os.path.dirname(os.path.abspath(path))])
    )
    main = vars(sys.modules["__main__"])
    loader = SourceFileLoader("__main__", path)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    # Apart from `__main__.py`, because the program's names replace the contents of that module.
    for name in [name for name in main if not (name.startswith("__") and name.endswith("__"))]:
        del main[name]
    main.update(__file__=path, __spec__=None, __loader__=loader, __package__=None, __doc__=None)
    main.pop("__cached__", None)
    exec(code, main)  # noqa: S102 - the program that this process was started for


def _show_the_programs_frames(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Hides the frames above the program's own first line."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
