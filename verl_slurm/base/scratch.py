"""Makes private directories for one process on its node, and removes those that killed processes left.

A process holds a lock on its directory while it lives.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """A new directory, 0700, under an unguessable name. It is ours until `close`, or until this process ends.

    `prefix` begins its name; leftovers of our dead processes under this prefix are removed first.
    """

    def __init__(self, prefix: str, root: str | Path | None = None) -> None:
        # Before ours is made: killed processes cannot clean up after themselves.
        _sweep(Path(root or tempfile.gettempdir()), prefix)
        while True:
            # The pid spares a sweep the opening of directories whose process it can see.
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=root))
            with contextlib.suppress(FileNotFoundError):  # another process removed it before it was locked
                self._lock = os.open(self.path, _OPEN)
                with contextlib.suppress(
                    OSError
                ):  # no locks on this file system: a sweep removes nothing there, either
                    # The pid in the name does not suffice: in a PID namespace, as containers have, a process
                    # sees none of the others with which it shares /tmp.
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                # Asked under the lock: between the two a sweep in another PID namespace may have taken it for a
                # leftover.
                if self.path.exists():
                    return
                os.close(self._lock)

    def close(self) -> None:
        """Removes the directory with its content. Call it once."""
        # Before the lock goes: no sweep works in it meanwhile.
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(root: Path, prefix: str) -> None:
    for left in root.glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix).split("-")[0]
        if not pid.isdigit() or Path(f"/proc/{pid}").exists():  # an earlier release of ours locks nothing
            continue
        try:
            lock = os.open(left, _OPEN)
        except OSError:  # no directory, another user's, or gone
            continue
        with contextlib.suppress(OSError):  # locked: its process lives in another PID namespace
            # In /tmp other users' directories may have this prefix.
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
        os.close(lock)
