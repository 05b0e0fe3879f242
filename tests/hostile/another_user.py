"""Another user of this machine: a process of uid 65534, made by util-linux's setpriv."""

import os
import subprocess
import sys
from functools import cache

import pytest

NOBODY = 65534


def _python_of_nobody(program: str = "") -> tuple[list[str], str]:
    """The words that start another user's Python that can run `program`, and why there are none to be had here."""
    problem = "only root can be another user"
    if os.geteuid() == 0:
        # Ours may lie below a home directory that is closed to him; the one behind our virtual environment seldom does.
        for python in dict.fromkeys((sys.executable, os.path.realpath(sys.executable), "/usr/bin/python3")):
            argv = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", python, "-I", "-S"]
            try:
                done = subprocess.run(
                    [*argv, "-c", program], cwd="/", capture_output=True, text=True, timeout=300, check=False
                )
            except OSError as error:
                return [], f"setpriv (util-linux): {error}"
            if done.returncode == 0:
                return argv, ""
            problem = f"he cannot run {python}: {done.stderr.strip()[-200:]}"
    return [], problem


PYTHON_OF_NOBODY, _PROBLEM = _python_of_nobody()
needs_another_user = pytest.mark.skipif(bool(_PROBLEM), reason=f"NOT RUN: no other user here: {_PROBLEM}")


WITH_OUR_PACKAGES = f"import sys; sys.path += {[path for path in sys.path if path.endswith('-packages')]!r}\n"
WITH_TORCH = f"{WITH_OUR_PACKAGES}import torch.distributed\n"


@cache
def python_with(*modules: str) -> list[str]:
    """The words that start another user's Python, whose program begins with `WITH_OUR_PACKAGES`; skips without one."""
    argv, problem = _python_of_nobody(WITH_OUR_PACKAGES + "\n".join(f"import {name}" for name in modules))
    if problem:
        pytest.skip(f"NOT RUN: no other user with {', '.join(modules)} here: {problem}")
    return argv


def python_with_torch() -> list[str]:
    return python_with("torch.distributed")
