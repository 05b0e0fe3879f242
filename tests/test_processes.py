"""The tests' own hold on processes: `tests/processes.py`, and that it is used."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import held, python_path, tell

HERE = Path(__file__).parent
# They make the variable from scratch on purpose.
OF_THEIR_OWN = {
    "processes.py",
    "test_processes.py",
    "daemon/test_launcher.py",
    "slurm/test_client.py",
    "submit/test_plan.py",
    "submit/test_programs.py",
    "submit/test_services.py",
    "submit/test_verl_checks.py",
    "hostile/test_search_path.py",
}


def test_a_process_that_ended_by_itself_is_passed_over() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        with held([process]):
            stopped = os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            assert stopped is not None
            assert stopped.si_status == signal.SIGSTOP
            child.kill()
            child.wait()
        tell([process], signal.SIGKILL)


@pytest.mark.scenario("GPU3")
def test_a_started_process_finds_what_only_pythonpath_has(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("")
    environ = python_path(environ={"PYTHONPATH": str(tmp_path)})
    program = "import only_here, verl_slurm, verl_slurm_daemon, tests"
    subprocess.run([sys.executable, "-c", program], env=environ, cwd=tmp_path, check=True)


@pytest.mark.scenario("GPU3")
def test_no_test_replaces_pythonpath() -> None:
    places = [path for path in HERE.rglob("*.py") if '"PYTHONPATH":' in path.read_text()]
    assert {str(path.relative_to(HERE)) for path in places} <= OF_THEIR_OWN
