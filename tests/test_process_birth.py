"""Which process of a number: by boot and tick, not by dates."""

import os
import subprocess
import sys

from verl_slurm.process_birth import birth_of


def test_a_process_keeps_its_birth_over_an_exec_and_another_has_its_own() -> None:
    show = (
        "from verl_slurm.process_birth import birth_of; import os; print(birth_of(os.getpid()), flush=True)"
    )
    again = f"import os, sys; {show}; os.execv(sys.executable, [sys.executable, '-c', {show!r}])"
    said = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True, check=True).stdout
    first, second = said.splitlines()
    assert first == second
    assert first not in ("", birth_of(os.getpid()))
    assert birth_of(os.getpid()) == birth_of(os.getpid())


def test_one_that_has_ended_has_none_even_before_its_parent_has_looked() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert birth_of(child.pid) == ""
    child.wait()
    assert birth_of(child.pid) == ""
