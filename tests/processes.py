"""Processes of a test: what they find on their path, and how they are signalled."""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

__all__ = ["held", "python_path", "tell"]

ROOT = Path(__file__).parent.parent


def python_path(*first: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`PYTHONPATH` of this checkout, with all that `environ` has on its own: packages may be found by it alone."""
    inherited = environ.get("PYTHONPATH", "")
    places = [*map(str, first), str(ROOT), str(ROOT / "daemon"), *filter(None, [inherited])]
    return {"PYTHONPATH": os.pathsep.join(places)}


def tell(processes: Iterable[psutil.Process], number: int) -> None:
    """Signal each. One that has ended by itself is passed over: between a look and a signal it may."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextmanager
def held(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """They stand still while the body runs, and never longer."""
    each = list(processes)
    tell(each, signal.SIGSTOP)
    try:
        yield
    finally:
        tell(each, signal.SIGCONT)
