"""Places to run a command in: as an ordinary user, and in an unprivileged container that this user makes.

The container has user, mount, pid and cgroup namespaces of its own, one user, cgroup v2 mounted read-only, no systemd,
and no further packages: util-linux's unshare makes it. Nothing of the machine is changed.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import ROOT, captured

NOBODY = 65534

# In a mount namespace: directories that are closed to others (root's home, where this Python may be) get a layer on
# top that is open. The files below keep their own modes.
_OPEN = """
layer=$1; shift
mount -t tmpfs none "$layer"
while [ "$1" != -- ]; do
    mkdir "$layer/$#" "$layer/$#/upper" "$layer/$#/work"
    mount -t overlay -o "lowerdir=$1,upperdir=$layer/$#/upper,workdir=$layer/$#/work" none "$1"
    chmod o+rx "$1"
    shift
done
shift
exec "$@"
"""
_CONTAINER = [
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--cgroup",
]
_INSIDE = 'mount -t cgroup2 -o ro none /sys/fs/cgroup; exec "$@"'
PLACES = {
    "an ordinary user": [],
    "a container's root": [*_CONTAINER, "--mount-proc", "sh", "-euc", _INSIDE, "sh"],
    "a container's user": [
        *[*_CONTAINER, "--mount-proc", "sh", "-euc", _INSIDE, "sh"],
        *["unshare", "--user", "--map-user=1000", "--map-group=1000"],
    ],
}
"""What stands before a command that an ordinary user runs there."""


def _closed_directories() -> list[str]:
    """Those above this Python, its packages and this checkout that others may not pass, the outermost first."""
    needed = [Path(sys.executable), Path(sys.executable).resolve(), ROOT, Path(sysconfig.get_path("purelib"))]
    above = {parent for path in needed for parent in [path, *path.parents] if parent.is_dir()}
    return sorted(str(path) for path in above if not path.stat().st_mode & 0o001)


@contextmanager
def home_of_nobody(directory: Path) -> Iterator[Path]:
    """A directory with a short name that belongs to the ordinary user."""
    if os.geteuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
    yield directory


def run_in(place: str, home: Path, *argv: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs a command of an ordinary user in that place; it ends with whatever it has left in a container.

    Where such a place cannot be made the test is skipped, with the reason.
    """
    before = PLACES[place]
    if os.geteuid() == 0:
        layer = home / ".layer"
        layer.mkdir(exist_ok=True)
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        opened = [str(layer), *_closed_directories(), "--"]
        before = ["unshare", "--mount", "sh", "-euc", _OPEN, "sh", *opened, *user, *before]
    elif any(Path(path).stat().st_uid != os.geteuid() for path in _closed_directories()):
        pytest.skip("NOT RUN: this Python is closed to its user")
    if before and shutil.which("unshare") is None:
        pytest.skip("NOT RUN: no unshare here (util-linux)")
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    tried = captured([*before, "true"], env={"PATH": os.environ["PATH"]}, timeout=30)
    if tried.returncode:
        pytest.skip(f"NOT RUN: no place like that of {place} can be made here: {tried.stderr.strip()}")
    variables = [f"{name}={value}" for name, value in environment.items()]
    return captured([*before, "env", "-i", *variables, *argv], cwd=home, timeout=timeout_s)
