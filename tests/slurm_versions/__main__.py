"""The table of causes on several releases of Slurm: `make test-slurm-versions SUITE=trixie`.

`host` is this machine's own Slurm. Any other suite is a release of Debian, or a version that is built from source, in a
root of its own (`roots.py`). What was seen goes to `benchmarks/results/slurm-VERSION.json` (`results.py`), and from
there to the table of docs/compatibility.md.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from tests.slurm_versions.cases import CASES, HOST, ROOT, SUITES
from tests.slurm_versions.record import VARIABLE
from tests.slurm_versions.results import PAGE, Version, fold, page, read_versions, write_version
from tests.slurm_versions.roots import is_version, make_root, missing, run_inside
from verl_slurm.slurm.devcluster.machine import EXTRA_PATH


def main() -> int:
    """Runs the tests on each suite, one after the other; 0 where all of them passed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.slurm_versions", description=__doc__.splitlines()[0]
    )
    suites = f"{HOST}, a release of Debian, or a version such as 25.11.7; default: {', '.join(SUITES)}"
    parser.add_argument("--suite", action="append", help=suites)
    parser.add_argument("--source", default="", help="a clone of github.com/SchedMD/slurm, for a version")
    parser.add_argument("words", nargs="*", help="for pytest; default: all cases of the table")
    chosen = parser.parse_args()
    # As an exception, so that `subprocess.run` ends the namespace, and with it every daemon in there.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    words = chosen.words or [case for cases in CASES.values() for case in cases]
    return max([_run(suite, words, chosen.source) for suite in chosen.suite or SUITES])


def _run(suite: str, words: list[str], source: str) -> int:
    """Runs pytest on one suite, and keeps what it showed; pytest's exit code."""
    if suite == HOST:
        problem = "" if shutil.which("slurmctld", path=EXTRA_PATH) else "no Slurm here (make slurm)"
    else:
        problem = missing(suite, source)
    if problem:
        print(f"NOT RUN on {suite}: {problem}")
        return 0
    root = None if suite == HOST else make_root(suite, source)
    version, origin = _slurm(root)
    if is_version(suite):
        origin = f"built from source on {origin}"
    python = sys.version.split()[0]
    print(f"on Slurm {version} ({origin}), Python {python} of this machine", flush=True)
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.slurm_versions.record"]
    argv = [*pytest, "-v", "-rA", "--show-capture=no", *words]
    environ = {**os.environ, "VERL_SLURM_SOAK": "1"}
    inside = {name: value for name, value in environ.items() if name.startswith("VERL_SLURM_")}
    before = {"date": datetime.now(UTC).date().isoformat(), "commit": _commit()}
    with tempfile.TemporaryDirectory(prefix="slurm-versions-") as tmp:
        os.chmod(tmp, 0o1777)
        # The place of /tmp in a root.
        record = Path(tmp, "record.jsonl")
        try:
            if root is not None:
                return run_inside(root, tmp, argv, {**inside, VARIABLE: f"/tmp/{record.name}"})
            return subprocess.run(
                argv, env={**environ, VARIABLE: str(record)}, cwd=ROOT, check=False
            ).returncode
        finally:
            # Also of a run that was cut off.
            if record.exists():
                known = {one.version: one for one in read_versions()}
                found = known.get(version, Version(version=version, origin=origin))
                print(f"writes {write_version(fold(found, record.read_text(), **before))}")
                PAGE.write_text(page(PAGE.read_text()))


def _slurm(root: Path | None) -> tuple[str, str]:
    """The version of Slurm, and which Debian it is from."""
    enter = [] if root is None else ["chroot", str(root)]
    path = {"PATH": EXTRA_PATH}

    def said(*argv: str) -> str:
        return subprocess.run(
            [*enter, *argv], env=path, capture_output=True, text=True, check=True
        ).stdout.strip()

    release = said("sh", "-c", '. /etc/os-release && echo "$PRETTY_NAME"')
    return said("slurmctld", "-V").split()[-1], release


def _commit() -> str:
    """The checkout's, short; with `+` where it has changes."""
    git = ["git", "-C", str(ROOT)]
    done = subprocess.run(
        [*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return "unknown"
    # Results of other suites may just have been written.
    changes = [*git, "status", "--porcelain", "--untracked-files=no", "--", "*.py"]
    changed = subprocess.run(changes, capture_output=True, text=True, check=False).stdout
    return done.stdout.strip() + ("+" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
