"""Which process of a number: by boot and tick, not by dates."""

import os
import subprocess
import sys
from pathlib import Path

from verl_slurm.base.processes import KnownProcess, birth_of, known
from verl_slurm.slurm.devcluster.cluster_processes import list_members


def test_a_process_keeps_its_birth_over_an_exec_and_another_has_its_own() -> None:
    show = (
        "from verl_slurm.base.processes import birth_of; import os; print(birth_of(os.getpid()), flush=True)"
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
    assert not KnownProcess(os.getpid(), "").is_running(), "a number without a birth is nobody"
    me = known(os.getpid())
    assert me is not None
    assert me.is_running()


def test_a_name_that_is_no_text_tells_no_less(tmp_path: Path) -> None:
    rename = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'\\xff) Z (', 0, 0, 0); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as named:
        assert named.stdout is not None
        named.stdout.readline()
        assert birth_of(named.pid) != ""
        # The embedded cluster looks at every process of the machine.
        assert list_members(tmp_path, tmp_path / "slurm.conf") == []
        named.communicate(b"\n")
