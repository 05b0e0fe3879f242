"""The lines of a file as they are written, for tests that wait for one."""

from collections.abc import Callable, Iterator
from pathlib import Path

from verl_slurm.runs.follow import watched


def follow_lines(
    path: Path,
    offset: int = 0,
    *,
    silence_s: Callable[[], float],
    beside: Path | None = None,
    on_beside: Callable[[], None] = lambda: None,
) -> Iterator[bytes | None]:
    """Yields each finished line after `offset`; None after so many seconds without any. Never ends by itself.

    Args:
        path: need not exist yet; its directory must.
        beside: another file in the same directory; `on_beside` is called at each look.
    """
    with watched(path.parent, {str(path), str(beside)}) as changed:
        while True:
            data = path.read_bytes()[offset:] if path.exists() else b""
            for line in (lines := data.split(b"\n")[:-1]):
                offset += len(line) + 1
                yield line
            on_beside()
            if not lines and not changed(silence_s()):
                yield None
