"""What a row of the fuzz table says."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """A parser of bytes that somebody else may have written.

    Attributes:
        parse: takes the bytes; may return what it likes. What it checks of its own result counts too.
        specimens: makes the valid inputs that are mutated; each must be taken by `parse`.
        raises: the errors its docstring promises. Any other is a finding.
        form: `json` or `msgpack`, where values in the tree shall be changed too.
        seal: makes the checksums of mutated bytes right, so that what lies behind them is reached; takes anything and
            raises nothing.
        torch: it imports torch.
        cost: how dear a call is, in those of a small JSON parser: a share of the inputs is given accordingly.
    """

    name: str
    parse: Callable[[bytes], object]
    specimens: Callable[[], Sequence[bytes]]
    raises: tuple[type[Exception], ...] = ()
    form: str = ""
    seal: Callable[[bytes], bytes] | None = None
    torch: bool = False
    cost: float = 1.0


@cache
def scratch() -> Path:
    """A directory in memory for parsers that want a file; goes with the process."""
    shm = Path("/dev/shm")
    base = shm if os.access(shm, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="vs-fuzz-", dir=base))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
