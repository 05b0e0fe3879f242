"""What several workers of a lane need, and the first of them makes: a model, a data set, an undisturbed run."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A directory that `make` fills, once for all workers of this session; they read it and change nothing."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a directory of its own below the session's
        root = root.parent
    place, done = root / f"made-{name}", root / f"made-{name}.done"
    with (root / f"made-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(place, ignore_errors=True)  # of a worker that failed at it
            place.mkdir(mode=0o700)
            make(place)
            done.touch()
    return place
