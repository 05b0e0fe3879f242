"""`kill_tree` ends what is below it, also where processes die while it looks."""

import os
import subprocess
import sys

import psutil
import pytest
from verl_slurm_daemon import descendants

SLEEPER = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]


@pytest.mark.parametrize(
    "going", [FileNotFoundError(2, "/proc/1/stat"), ProcessLookupError(3, ""), psutil.AccessDenied(1)]
)
def test_a_process_that_dies_while_it_is_looked_at_does_not_save_the_others(
    monkeypatch: pytest.MonkeyPatch, going: Exception
) -> None:
    children = psutil.Process.children
    looks: list[bool] = []

    def look(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        looks.append(recursive)
        if len(looks) == 1:
            raise going
        return [child for child in children(self, recursive) if child.pid == mine.pid]

    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as mine:
        assert mine.stdout is not None
        mine.stdout.readline()
        monkeypatch.setattr(psutil.Process, "children", look)
        assert descendants.kill_tree() == []
        assert len(looks) >= 2
        assert not psutil.pid_exists(mine.pid) or psutil.Process(mine.pid).ppid() != os.getpid()
