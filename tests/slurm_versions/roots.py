"""A Debian of another release in `.slurm-roots/`, with the Slurm of that release or one built from source in it.

The tests run inside, in a mount and a process namespace of their own: nothing of them outlives the command. Only Python
with its packages and this checkout are the host's, bound into it. That works as long as the release is not older than
the host. It needs root, debootstrap, and a Python outside of /usr, as pyenv and uv install them.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.slurm_versions.cases import ROOT

_ROOTS = ROOT / ".slurm-roots"
_DEBIAN = "http://deb.debian.org/debian"
_BUILT_ON = "bookworm"
"""Its compiler takes 23.02 as well as 25.11."""

# What tests call; python3 for the libraries that this machine's Python is linked with, whose names differ by release.
_PACKAGES = (
    "munge",
    "procps",
    "iproute2",
    "gcc",
    "libc6-dev",
    "ca-certificates",
    "python3",
    "libgomp1",
    "libstdc++6",
)
_OF_DEBIAN = ("slurm-wlm",)
_FOR_SOURCE = ("make", "pkgconf", "libmunge-dev", "libjson-c-dev", "libhttp-parser-dev")

# In the root, without documentation. json-c is for `scontrol --json`. Two nodes of one machine do not find each other
# without multiple slurmds (25.11.7). Static libraries would have each file compiled twice.
_BUILD = """
set -eu
cd /usr/src/slurm
./configure --quiet --prefix=/usr --sysconfdir=/etc/slurm --enable-multiple-slurmd --disable-static --disable-debug \\
  --disable-slurmrestd --with-json CFLAGS='-O1 -g0'
make -s -j"$(nproc)" -C src install
cd / && rm -rf /usr/src/slurm
"""

# $1 the root, $2 an empty directory for /tmp, $3 the checkout, $4.. what is bound as it is, --, the command.
_ENTER = """
set -eu
root=$1 tmp=$2 work=$3; shift 3
mount -t proc proc "$root/proc"
for place in /sys /dev; do mount --rbind "$place" "$root$place"; done
mount -t tmpfs none "$root/run"
mount --bind "$tmp" "$root/tmp"
for file in /etc/hosts /etc/resolv.conf /etc/hostname; do touch "$root$file"; mount --bind "$file" "$root$file"; done
while [ "$1" != -- ]; do mkdir -p "$root$1"; mount --bind "$1" "$root$1"; shift; done
shift
# Not exec: this shell is the namespace's first process, and waits for the daemons that are handed to it.
chroot "$root" sh -c 'cd "$0" && exec "$@"' "$work" "$@"
"""


def is_version(suite: str) -> bool:
    """Whether that names a version of Slurm (25.11.7) and no release of Debian."""
    return re.fullmatch(r"\d\d\.\d\d\.\d+", suite, re.ASCII) is not None


def root_of(suite: str) -> Path:
    """Where its root is, or will be."""
    return _ROOTS / suite


def missing(suite: str, source: str) -> str:
    """What this machine lacks for that root; empty: nothing."""
    if os.geteuid() != 0:
        return "a root of another Debian can be entered by root alone"
    if sys.base_prefix == "/usr":
        return "this Python lies in /usr, which is the other Debian's in there; make PYTHON=... with one of pyenv or uv"
    if root_of(suite).is_dir():
        return ""
    if shutil.which("debootstrap") is None:
        return "no debootstrap here (apt-get install debootstrap)"
    if is_version(suite) and not source:
        return "it is built from source: SLURM_SOURCE=DIR, a clone of github.com/SchedMD/slurm"
    return ""


def make_root(suite: str, source: str) -> Path:
    """Makes the root if it is not there; half a root is never taken for one.

    Args:
        suite: a release of Debian, or a version of Slurm.
        source: a clone of Slurm's repository with its tags, for a version.
    """
    root = root_of(suite)
    if root.is_dir():
        return root
    _ROOTS.mkdir(exist_ok=True)
    half = root.with_name(f".{root.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    release, more = (_BUILT_ON, _FOR_SOURCE) if is_version(suite) else (suite, _OF_DEBIAN)
    print(f"making {root} (Debian {release}, about 700 MB) ...", flush=True)
    include = f"--include={','.join((*_PACKAGES, *more))}"
    log = _ROOTS / f"{suite}.log"
    with open(log, "wb") as output:
        # What debootstrap mounts goes with its namespace.
        steps = [
            ["unshare", "--mount", "debootstrap", "--variant=minbase", include, release, str(half), mirror()]
        ]
        if is_version(suite):
            place = half / "usr/src/slurm"
            tag = f"slurm-{suite.replace('.', '-')}-1"
            packed = f"{half}/usr/src/slurm.tar"
            steps += [
                ["git", "-C", source, "archive", f"--output={packed}", f"--prefix={place.name}/", tag],
                ["tar", "-C", str(place.parent), "-xf", packed],
                ["chroot", str(half), "sh", "-c", _BUILD],
            ]
        for argv in steps:
            if subprocess.run(argv, stdout=output, stderr=output, check=False).returncode:
                last = log.read_text(errors="replace").splitlines()[-1:]
                sys.exit(f"{argv[0]} failed: {last} (see {log})")
    half.rename(root)
    return root


def mirror() -> str:
    """Where this machine has its own Debian from."""
    argv = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("Debian http")]
    return found[0] if found else _DEBIAN


def run_inside(root: Path, tmp: str, argv: list[str], environ: Mapping[str, str]) -> int:
    """Runs a command in the root and waits for it and all that it started; its exit code.

    Args:
        tmp: an empty directory of the host that is /tmp in there.
        environ: variables beside HOME, LC_ALL and PATH.
    """
    places = {str(ROOT), sys.prefix, sys.base_prefix}
    path = f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    env = {**environ, "HOME": "/root", "LC_ALL": "C.UTF-8", "PATH": path}
    namespace = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    words = ["sh", str(root), tmp, str(ROOT), *sorted(places), "--", *argv]
    return subprocess.run([*namespace, "sh", "-c", _ENTER, *words], env=env, check=False).returncode
