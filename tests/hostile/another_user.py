"""Another user of this machine: a process of uid 65534, made by util-linux's setpriv."""

import os
import subprocess
import sys

import pytest

NOBODY = 65534


def _python_of_nobody() -> tuple[list[str], str]:
    """The words that start a Python of his, and why there are none to be had here."""
    problem = "only root can be another user"
    if os.geteuid() == 0:
        # Ours may lie below a home directory that is closed to him; the one behind our virtual environment seldom does.
        for python in dict.fromkeys((sys.executable, os.path.realpath(sys.executable), "/usr/bin/python3")):
            argv = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", python, "-I", "-S"]
            try:
                done = subprocess.run(
                    [*argv, "-c", ""], cwd="/", capture_output=True, text=True, timeout=60, check=False
                )
            except OSError as error:
                return [], f"setpriv (util-linux): {error}"
            if done.returncode == 0:
                return argv, ""
            problem = f"he cannot run {python}: {done.stderr.strip()[-200:]}"
    return [], problem


PYTHON_OF_NOBODY, _PROBLEM = _python_of_nobody()
needs_another_user = pytest.mark.skipif(bool(_PROBLEM), reason=f"NOT RUN: no other user here: {_PROBLEM}")
