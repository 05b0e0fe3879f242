"""A run in a directory that a group may write: a member puts another one in its place before the job starts.

What the member would do is done here by root, and given to the other user afterwards.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.another_user import NOBODY
from tests.hostile.measured import measured
from tests.local_runs import QUICK, prepared
from verl_slurm.base.exit_codes import ExitCode

pytestmark = [
    pytest.mark.scenario("SEC12"),
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: only root can give a directory away"),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Where a run lies, or is to lie."""
    group = tmp_path / "group"
    group.mkdir()
    group.chmod(0o2775)
    return group / "run"


def submit(run: Path, *options: str) -> str:
    done = measured("submit", "quickstart", "--cluster", "local", *QUICK, f"run_dir={run}", *options)
    assert done.code == 0, done.err
    assert "put another one in its place" in done.err
    return done.out


def exchange(run: Path) -> None:
    """Put an empty directory of the other user's in the run's place."""
    if run.exists():
        run.rename(run.with_name("theirs"))
    run.mkdir(mode=0o755)


def give_away(run: Path) -> None:
    for path in (run, *run.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


def start(*argv: str) -> subprocess.CompletedProcess[str]:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SUBMITIT"))
    }
    of_job = {"EXECUTOR": "local", "LOCAL_JOB_ID": "7", "LOCAL_NTASKS": "1", "LOCAL_GLOBALID": "0"}
    of_job |= {"LOCAL_JOB_NUM_NODES": "1", "LOCAL_NODEID": "0", "LOCAL_LOCALID": "0"}
    environ |= {f"SUBMITIT_{name}": value for name, value in of_job.items()}
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=300, check=False)


def test_no_program_of_an_exchanged_run_is_started(run: Path, tmp_path: Path) -> None:
    prepared(run)
    exchange(run)
    sign, program = tmp_path / "sign", run / "program.py"
    program.write_text(f"import os; os.mkdir({str(sign)!r})\n")
    (run / "run.yaml").write_text(
        f"name: quickstart\nrun_dir: {run}\ntrainer: {{backend: command, command: [{program}]}}\n"
        "distributed: {dp_size: 1, nodes: 1, device: cpu}\n"
    )
    give_away(run)
    done = start(sys.executable, "-P", "-m", "verl_slurm_daemon", "lead", "--run", str(run))
    assert not sign.exists()
    assert done.returncode == ExitCode.PERMISSION, done.stdout + done.stderr
    assert not (run / "events.jsonl").exists()


def test_a_run_where_everybody_may_write_is_refused_before_queueing(run: Path) -> None:
    run.parent.chmod(0o777)
    done = measured("submit", "quickstart", "--cluster", "local", *QUICK, f"run_dir={run}", "--dry-run")
    assert done.code == ExitCode.PERMISSION
    assert "chmod +t" in done.err
    assert not run.exists()
