"""A medium that is slow, or hangs for ever: writes wait at a gate."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from verl_slurm.save.writer import writing


class Gate:
    """Where writes of the tensors to one medium wait.

    Attributes:
        reached: a write has come to it: it has begun on that medium, and not more.
    """

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()
        self._error: Exception | None = None

    def open(self, error: Exception | None = None) -> None:
        """Let all pass, or fail with `error`."""
        self._error = error
        self._opened.set()

    def wait(self) -> None:
        self.reached.set()
        assert self._opened.wait(60)
        if self._error is not None:
            raise self._error


@contextmanager
def gate(below: Path) -> Iterator[Gate]:
    """A gate before the last file of tensors on the medium at `below`; what was written before lies there."""
    found, real = Gate(), writing._folder
    with pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def folder(root: int, name: str) -> Iterator[int]:
            if name == "optimizer" and Path(f"/proc/self/fd/{root}").readlink().is_relative_to(below):
                found.wait()
            with real(root, name) as fd:
                yield fd

        patch.setattr(writing, "_folder", folder)
        try:
            yield found
        finally:
            found.open()
