"""The table of causes on the Slurm of another Debian release: `make test-slurm-versions SUITE=trixie`.

A whole Debian of that release, Slurm, munge and C library, is made once in `.slurm-roots/SUITE`. The tests run inside,
in a mount and a process namespace of their own: nothing of them outlives the command. Only Python with its packages and
this checkout are the host's, bound into it. That works as long as the release is not older than the host.

It needs root, debootstrap, and a Python outside of /usr, as pyenv and uv install them.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOTS = ROOT / ".slurm-roots"
DEBIAN = "http://deb.debian.org/debian"

# Slurm; what Python's own modules and torch are linked with; what tests call.
PACKAGES = (
    *("slurm-wlm", "munge", "procps", "iproute2", "gcc", "libc6-dev"),
    *(
        "ca-certificates",
        "libssl3t64",
        "libffi8",
        "libsqlite3-0",
        "libbz2-1.0",
        "liblzma5",
        "zlib1g",
        "libexpat1",
    ),
    *("libreadline8t64", "libncursesw6", "libuuid1", "libstdc++6", "libgomp1", "libcrypt1"),
)

# What interrupts a run, whatever comes of it, and what differs between versions.
TESTS = (
    "tests/slurm_cluster/test_interruptions.py",
    "tests/slurm_cluster/test_stays_finished.py",
    "tests/slurm_cluster/test_ends_without_requeue.py",
    "tests/devcluster/test_cluster.py",
    "tests/devcluster/test_new_pids.py",
)

# $1 the root, $2 an empty directory for /tmp, $3 the checkout, $4.. what is bound as it is, --, the command.
ENTER = """
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


def main() -> int:
    """Make the root if it is not there, and run the tests in it; pytest's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.slurm_versions", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--suite", default="trixie", help="a release of Debian (trixie: Slurm 24.11)")
    parser.add_argument("words", nargs="*", help="for pytest; default: the table of causes")
    chosen = parser.parse_args()
    # As an exception, so that `subprocess.run` ends the namespace, and with it every daemon in there.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if problem := _missing():
        print(f"NOT RUN: {problem}")
        return 0
    root = ROOTS / chosen.suite
    if not root.is_dir():
        _make(root, chosen.suite)
    version = subprocess.run(["chroot", root, "slurmctld", "-V"], capture_output=True, text=True, check=True)
    print(
        f"on {version.stdout.strip()} (Debian {chosen.suite}), Python {sys.version.split()[0]} of this machine",
        flush=True,
    )
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rA", "--show-capture=no"]
    return _inside(root, [*pytest, *(chosen.words or TESTS)])


def _missing() -> str:
    if os.geteuid() != 0:
        return "a root of another Debian can be entered by root alone"
    if shutil.which("debootstrap") is None:
        return "no debootstrap here (apt-get install debootstrap)"
    if sys.base_prefix == "/usr":
        return "this Python lies in /usr, which is the other Debian's in there; make PYTHON=... with one of pyenv or uv"
    return ""


def _make(root: Path, suite: str) -> None:
    """Half a root is never taken for one; what debootstrap mounts goes with its namespace."""
    ROOTS.mkdir(exist_ok=True)
    half = root.with_name(f".{root.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    print(f"making {root} (Debian {suite}, about 700 MB) ...", flush=True)
    options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
    log = ROOTS / f"{suite}.log"
    with open(log, "wb") as output:
        argv = ["unshare", "--mount", "debootstrap", *options, suite, str(half), _mirror()]
        done = subprocess.run(argv, stdout=output, stderr=output, check=False)
    if done.returncode:
        sys.exit(f"debootstrap failed: {log.read_text(errors='replace').splitlines()[-1:]} (see {log})")
    half.rename(root)


def _mirror() -> str:
    """Where this machine has its own Debian from."""
    argv = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("Debian http")]
    return found[0] if found else DEBIAN


def _inside(root: Path, argv: list[str]) -> int:
    places = {str(ROOT), sys.prefix, sys.base_prefix}
    environ = {name: value for name, value in os.environ.items() if name.startswith("VERL_SLURM_")}
    environ |= {"HOME": "/root", "LC_ALL": "C.UTF-8", "VERL_SLURM_SOAK": "1"}
    environ["PATH"] = f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    with tempfile.TemporaryDirectory(prefix="slurm-versions-") as tmp:
        os.chmod(tmp, 0o1777)
        namespace = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        words = ["sh", str(root), tmp, str(ROOT), *sorted(places), "--", *argv]
        return subprocess.run([*namespace, "sh", "-c", ENTER, *words], env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
