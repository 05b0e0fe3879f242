"""Whether a run still lives, and when its job starts or ends."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from tests.builders import owner
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import birth_of
from verl_slurm.journal.history import Submission
from verl_slurm.runs.liveness import job_state, leads, may_be_of, start_left
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.parse import parse_job
from verl_slurm.slurm.slurm_client import SlurmClient

GOLDEN = Path(__file__).parents[1] / "slurm/golden"


def owned(root: Path, *, pid: int, job_id: str, taken: datetime, born: str) -> RunPaths:
    paths = RunPaths(private_dir(root))
    claim = owner(job_id=job_id, pid=pid, taken=taken.isoformat(), born=born)
    write_file(paths.attempt, msgspec.json.encode(claim))
    return paths


@pytest.fixture
def lead_pid(tmp_path: Path) -> Iterator[int]:
    """A process with the words of a lead of `run`."""
    argv = [sys.executable, "-c", "input()", "lead", "--run", "run"]
    with subprocess.Popen(argv, cwd=tmp_path, stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n")


@pytest.mark.parametrize(
    ("there", "job", "alive"),
    [(True, "local-7", True), (True, "local-8", False), (False, "local-7", False)],
    ids=["it lives", "another has the run", "no such process"],
)
def test_a_lead_that_was_started_by_hand_lives_as_long_as_its_process(
    tmp_path: Path, lead_pid: int, there: bool, job: str, alive: bool
) -> None:
    """Of a hostfile run, say: it has no controller of submitit's, and was called gone while it ran."""
    pid = lead_pid if there else 999_999_999
    born = birth_of(lead_pid)
    paths = owned(tmp_path / "run", pid=pid, job_id="local-7", taken=datetime.now(UTC), born=born)
    submission = Submission(job_id=job, cluster="local", host=socket.gethostname())
    state = job_state(paths, submission)
    assert (state.state, state.over) == (("RUNNING", False) if alive else ("GONE", True))
    assert [process.pid for process in leads(paths, submission)] == ([pid] if alive else [])


@pytest.mark.scenario("K02")
@pytest.mark.parametrize(
    ("born", "alive"),
    [("now", True), ("another boot:1", False), ("", False)],
    ids=["ours", "a former boot's", "not told"],
)
@pytest.mark.parametrize("off_s", [-(10**6), 10**6])
def test_whether_a_lead_by_hand_lives_is_told_by_its_birth_and_not_by_dates(
    tmp_path: Path, lead_pid: int, born: str, alive: bool, off_s: int
) -> None:
    taken = datetime.now(UTC) + timedelta(seconds=off_s)
    birth = birth_of(lead_pid) if born == "now" else born
    paths = owned(tmp_path / "run", pid=lead_pid, job_id="local-7", taken=taken, born=birth)
    submission = Submission(job_id="local-7", cluster="local", host=socket.gethostname())
    assert job_state(paths, submission).over is not alive


def test_a_job_that_waits_has_a_start_and_one_that_runs_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ""

    async def answer(_: SlurmClient, number: int) -> JobFacts:
        return parse_job(text, number)

    monkeypatch.setattr(SlurmClient, "job", answer)
    job, paths = Submission(job_id="1", cluster="slurm"), RunPaths(tmp_path)
    text = (GOLDEN / "running.txt").read_text()
    state = job_state(paths, job)
    assert (state.starts, state.ends) == (None, datetime.fromtimestamp(1795222831, UTC))
    text = (GOLDEN / "pending.txt").read_text()
    assert (job_state(paths, job).starts, job_state(paths, job).waits) == (None, True)
    text = text.replace("StartTime=Unknown", "StartTime=1795222231")
    state = job_state(paths, job)
    assert (state.starts, state.ends) == (datetime.fromtimestamp(1795222231, UTC), None)


SUBMITTED = 1795222229
"""As the golden job was."""


@pytest.mark.parametrize(
    ("command", "by_us", "heard_s", "restarts", "its"),
    [
        ("(null)", True, 60, 0, False),
        ("(null)", False, 60, 0, True),
        ("(null)", False, -3600, 0, False),
        ("(null)", False, -60, 0, True),
        ("(null)", False, -3600, 1, True),
        ("/home/ada/mine.sh", False, 60, 0, True),
        ("/home/ada/mine.sh", False, -3600, 0, False),
        ("/home/ada/mine.sh", True, 60, 0, False),
        (f"/home/ada/logs/.submission_file_{'0' * 32}.sh", False, 60, 0, False),
        ("{}/logs/1.sh", True, -3600, 0, True),
    ],
    ids=[
        "ours had a script",
        "salloc",
        "a number that came again",
        "clocks differ",
        "a requeue is a new submission",
        "a script by hand",
        "a later one",
        "ours has another",
        "another run's",
        "ours",
    ],
)
def test_a_number_that_came_again_is_not_the_runs(
    tmp_path: Path, command: str, by_us: bool, heard_s: int, restarts: int, its: bool
) -> None:
    text = (GOLDEN / "running.txt").read_text().replace("root(0)", f"me({os.getuid()})")
    text = re.sub("Command=.*", f"Command={command.format(tmp_path)}", text)
    job = parse_job(text.replace("Restarts=0", f"Restarts={restarts}"), 1)
    assert may_be_of(tmp_path, job, queued_by_us=by_us, heard_at=SUBMITTED + heard_s) is its
    other = msgspec.structs.replace(job, user_id=os.getuid() + 1)
    assert may_be_of(tmp_path, other, queued_by_us=by_us, heard_at=SUBMITTED) is command.startswith("{}")


@pytest.mark.parametrize(("since_s", "told"), [(-600.0, True), (600.0, False), (None, True)])
def test_what_a_script_said_of_a_start_counts_until_the_journal_has_news(
    since_s: float | None, told: bool
) -> None:
    when = datetime(2026, 11, 27, 9, 0)  # noqa: DTZ001 - by the clock of the node, as the script writes it
    heard_at = None if since_s is None else when.timestamp() + since_s
    said = start_left("verl-slurm: 2026-11-27T09:00 n1: python fails: no such file", heard_at)
    assert ("2026-11-27T09:00 n1: python fails: no such file" in said) is told
    assert start_left("", heard_at) == ""
