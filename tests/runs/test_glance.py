"""Many runs at a glance: what is read, who is asked, and what is not believed."""

import json
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.journals import append_event
from tests.many_runs import Kind, make_run
from tests.processes import captured
from verl_slurm.base.errors import SlurmMissing
from verl_slurm.base.files import private_dir
from verl_slurm.journal import files
from verl_slurm.journal.status import read_status
from verl_slurm.runs import glance as runs_glance
from verl_slurm.runs.glance import (
    Glance,
    Seen,
    ask_for,
    find_runs,
    glance,
    glance_at_all,
    requeue_after_end,
    state_of,
)
from verl_slurm.runs.liveness import JobState
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.parse import parse_job
from verl_slurm.slurm.slurm_client import SlurmClient

GOLDEN = Path(__file__).parents[1] / "slurm/golden"
Questions = list[set[int]]
LONG = 800
"""Events: a hundred kilobytes, where four are read."""


@pytest.fixture
def squeue(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, tuple[str, str, str, str, str]], Questions]:
    """What Slurm says, and each question that it was asked."""
    states: dict[int, tuple[str, str, str, str, str]] = {}
    questions: Questions = []

    async def answer(_: SlurmClient, users: set[int]) -> dict[int, tuple[str, str, str, str, str]]:
        questions.append(set(users))
        return states

    monkeypatch.setattr(SlurmClient, "states", answer)
    return states, questions


def state(root: Path) -> str:
    run = glance(root)
    seen, _ = ask_for([run])
    return state_of(run, seen.get(root))


@pytest.mark.parametrize("num_events", [60, LONG])
@pytest.mark.parametrize(
    ("kind", "slurm", "shown"),
    [
        ("running", "RUNNING", "running"),
        ("running", "PENDING", "queued"),
        ("running", "PENDING JobHeldUser", "held"),
        ("running", "PENDING BadConstraints", "held"),
        ("running", "SPECIAL_EXIT job requeued in special exit state", "held"),
        ("running", "RESV_DEL_HOLD Reservation workshop was deleted", "held"),
        ("running", "RESV_DEL_HOLD Priority", "queued"),
        ("running", "REQUEUE_HOLD JobHeldAdmin", "held"),
        ("running", "SUSPENDED", "suspended"),
        ("running", "STOPPED", "suspended"),
        ("running", "", "gone"),
        ("queued", "PENDING", "queued"),
        ("queued", "RUNNING", "starting"),
        ("queued", "", "gone"),
        ("done", "", "done"),
        ("cancelled", "", "cancelled"),
        ("failed", "", "failed with 22"),
    ],
)
def test_a_runs_state_is_what_its_files_and_slurm_say(
    tmp_path: Path,
    squeue: tuple[dict[int, tuple[str, str, str, str, str]], Questions],
    kind: Kind,
    slurm: str,
    shown: str,
    num_events: int,
) -> None:
    make_run(tmp_path / "run", kind, num_events=num_events)
    if slurm:
        name, _, reason = slurm.partition(" ")
        squeue[0][7] = (name, reason, "", "", "")
    assert state(tmp_path / "run") == shown


@pytest.mark.parametrize(
    ("slurm", "shown"),
    [("PENDING", "queued"), ("PENDING JobHeldUser", "held"), ("RUNNING", "starting"), ("", "prepared")],
)
def test_a_run_whose_job_no_journal_names_is_what_slurm_says(
    tmp_path: Path,
    squeue: tuple[dict[int, tuple[str, str, str, str, str]], Questions],
    monkeypatch: pytest.MonkeyPatch,
    slurm: str,
    shown: str,
) -> None:
    run = make_run(tmp_path / "run", "queued")
    run.events.unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert state(run.root) == "prepared"
    assert squeue[1] == [], "without Slurm no question is asked"
    (private_dir(tmp_path / "bin") / "squeue").write_text("")
    (tmp_path / "bin/squeue").chmod(0o700)
    name, _, reason = slurm.partition(" ")
    other = make_run(tmp_path / "other", "queued", job_id="8").root
    squeue[0][8] = ("RUNNING", "", f"{other}/logs/8.sh", "/", "")
    if slurm:
        squeue[0][9] = (name, reason, "/opt/sbatch/multi_node.sbatch run", str(tmp_path), "")
    runs = glance_at_all(tmp_path)
    seen, _ = ask_for(runs)
    assert [state_of(one, seen[one.root]) for one in runs] == ["starting", shown]


@pytest.fixture
def slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (private_dir(tmp_path / "bin") / "squeue").write_text("")
    (tmp_path / "bin/squeue").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.mark.usefixtures("slurm_here")
@pytest.mark.parametrize(("kind", "end"), [("cancelled", "cancelled"), ("failed", "failed with 22")])
@pytest.mark.parametrize(
    ("slurm", "script", "began_s", "shown"),
    [
        ("PENDING BeginTime", "runs/run", None, "queued"),
        ("PENDING JobHeldUser", "runs/run", None, "held"),
        ("RUNNING", "runs/run", 60, "starting"),
        ("RUNNING", "runs/run", -60, ""),
        ("COMPLETING", "runs/run", None, ""),
        ("PENDING", "runs/other", None, ""),
        ("", "runs/run", None, ""),
    ],
    ids=["waits", "held", "starts", "not over yet", "completes", "another's", "over"],
)
def test_a_job_that_was_requeued_after_its_end_counts_and_one_that_lingers_does_not(
    tmp_path: Path,
    squeue: tuple[dict[int, tuple[str, str, str, str, str]], Questions],
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    end: str,
    slurm: str,
    script: str,
    began_s: int | None,
    shown: str,
) -> None:
    run = make_run(tmp_path / "runs/run", kind)
    make_run(tmp_path / "runs/living", job_id="8")
    squeue[0][8] = ("RUNNING", "", f"{tmp_path}/runs/living/logs/8.sh", "/", "")
    name, _, reason = slurm.partition(" ")
    if slurm:
        squeue[0][7] = (name, reason, f"{tmp_path / script}/logs/7.sh", "/", "")
    word = glance(run.root).word
    assert word is not None
    assert word.at is not None
    since = None if began_s is None else datetime.fromtimestamp(word.at + began_s, UTC)
    is_anothers = script != "runs/run"
    answer = JobState(state=name, over=is_anothers, waits=name == "PENDING", since=since)
    monkeypatch.setattr(runs_glance, "job_state", lambda *_: answer)
    living, one = glance_at_all(tmp_path / "runs")
    seen, _ = ask_for([living, one])
    assert (state_of(living, seen[living.root]), state_of(one, seen.get(one.root))) == (
        "running",
        shown or end,
    )
    words = requeue_after_end(one, seen.get(one.root))
    assert (f"requeued after its end ({end})" in words, f"verl-slurm cancel {run.root}" in words) == (
        bool(shown),
    ) * 2
    assert squeue[1] == [{os.getuid()}], "one question for both"


def test_a_run_whose_number_another_runs_job_has_is_gone_however_little_was_read(
    tmp_path: Path,
    squeue: tuple[dict[int, tuple[str, str, str, str, str]], Questions],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was read of a long journal does not have that `submit` queued the job."""
    run = make_run(tmp_path / "run", num_events=LONG)
    other = make_run(tmp_path / "other", job_id="8")
    for script in (f"{other.logs}/.submission_file_{'0' * 32}.sh", "(null)"):
        squeue[0][7] = ("RUNNING", "", script, "/", "")
        text = (GOLDEN / "running.txt").read_text().replace("JobId=1 ", "JobId=7 ")
        facts = parse_job(re.sub("Command=.*", f"Command={script}", text), 7)

        async def answer(_: SlurmClient, number: int, facts: JobFacts = facts) -> JobFacts:
            return facts

        monkeypatch.setattr(SlurmClient, "job", answer)
        private_dir(other.logs)
        assert state(run.root) == "gone"


def test_a_run_whose_saves_fail_says_so(
    tmp_path: Path, squeue: tuple[dict[int, tuple[str, str, str, str, str]], Questions]
) -> None:
    paths = make_run(tmp_path / "run")
    paths.status.write_text(json.dumps(read_status(paths) | {"save_problem": "no space"}))
    squeue[0][7] = ("RUNNING", "", "", "", "")
    assert state(tmp_path / "run") == "saves fail"


def test_a_run_that_was_cancelled_before_it_started_is_not_gone(
    tmp_path: Path, squeue: tuple[dict[int, tuple[str, str, str, str, str]], Questions]
) -> None:
    append_event(make_run(tmp_path / "run", "queued"), "cancel_asked")
    assert state(tmp_path / "run") == "cancelled"


def test_slurm_is_asked_once_for_all_runs_and_not_for_those_that_are_over(
    tmp_path: Path, squeue: tuple[dict[int, tuple[str, str, str, str, str]], Questions]
) -> None:
    for number in range(20):
        make_run(tmp_path / f"{number:02d}", "running" if number % 2 else "done", job_id=str(number))
        squeue[0][number] = ("RUNNING", "", "", "", "")
    runs = glance_at_all(tmp_path)
    seen, problem = ask_for(runs)
    assert squeue[1] == [{os.getuid()}]
    assert (len(runs), len(seen), problem) == (20, 10, "")


def test_a_run_that_ends_between_the_two_looks_is_not_gone(
    tmp_path: Path, squeue: tuple[dict[int, tuple[str, str, str, str, str]], Questions]
) -> None:
    paths = make_run(tmp_path / "run")
    run = glance(paths.root)
    append_event(paths, "ended", attempt=1, job_id="7", exit_code=0)
    seen, _ = ask_for([run])
    assert state_of(run, seen.get(paths.root)) == "done"
    run = glance(make_run(tmp_path / "other").root)
    append_event(paths, "submitted", job_id="8", cluster="slurm")
    assert state(paths.root) == "gone", "job 8 was not in the answer to a question that was about it"


def test_without_an_answer_nothing_is_said_to_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_answer(_: SlurmClient, users: set[int]) -> dict[int, tuple[str, str, str, str, str]]:
        raise SlurmMissing("Slurm does not answer")

    monkeypatch.setattr(SlurmClient, "states", no_answer)
    run = glance(make_run(tmp_path / "run").root)
    seen, problem = ask_for([run])
    assert seen[run.root].alive is None
    assert state_of(run, seen[run.root]) == "running?"
    assert "does not answer" in problem


def test_a_local_lead_that_was_killed_is_gone_whatever_its_snapshot_says(tmp_path: Path) -> None:
    import socket

    paths = make_run(tmp_path / "run", cluster="local", job_id="999999999", host=socket.gethostname())
    assert state(paths.root) == "gone"
    elsewhere = make_run(tmp_path / "there", cluster="local", host="nowhere")
    assert state(elsewhere.root) == "running?"


def test_what_interruptions_cost_is_the_same_from_the_snapshot_and_from_the_journal(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", num_events=LONG)
    quick = glance(paths.root)
    whole = files.read_history(paths)
    assert quick.interruptions == len(whole.outages) > 3
    assert quick.interrupted_s == whole.interrupted_s
    paths.status.write_text('{"state": "running", "job_id": "7"}')  # of a daemon that did not count
    slow = glance(paths.root)
    assert (slow.interruptions, slow.interrupted_s) == (quick.interruptions, quick.interrupted_s)
    assert slow.last_interruption == quick.last_interruption


def test_an_end_of_the_journal_that_says_too_little_is_read_further_back(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "done")
    for _ in range(200):
        append_event(paths, "alert_save_asked")
    assert state_of(glance(paths.root), None) == "done"


_COUNTER = """
import sys
from pathlib import Path
place, count = sys.argv[1], [0]
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(place):
        count[0] += 1
from verl_slurm.runs.glance import glance_at_all
sys.addaudithook(hook)
runs = glance_at_all(Path(place))
print(len(runs), count[0])
"""


def test_a_run_costs_three_files_and_one_directory_however_long_it_has_lived(tmp_path: Path) -> None:
    """The guard of the speed: a thousand runs in two seconds leave two milliseconds each."""
    for number in range(6):
        kinds: tuple[Kind, ...] = ("running", "done", "queued")
        make_run(tmp_path / f"run-{number}", kinds[number % 3], num_events=LONG, num_checkpoints=12)
    done = captured([sys.executable, "-c", _COUNTER, str(tmp_path)], check=True)
    assert done.stdout.split() == ["6", str(1 + 6 * 4)]


def test_the_bytes_that_are_read_do_not_grow_with_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_run(tmp_path / "run", num_events=LONG)
    read: list[int] = []
    real = os.pread
    monkeypatch.setattr(
        os, "pread", lambda fd, size, at: read.append(len(data := real(fd, size, at))) or data
    )
    glance(paths.root)
    assert sum(read) == 4096 < paths.events.stat().st_size // 20


def test_runs_are_found_below_directories_but_not_below_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "me" / "a")
    make_run(tmp_path / "me" / "a" / "checkpoints" / "not-looked-at")
    make_run(tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert [run.root.relative_to(tmp_path).as_posix() for run in glance_at_all(tmp_path)] == ["b", "me/a"]
    assert list(find_runs(tmp_path / "nowhere")) == []


def test_a_link_that_leads_nowhere_hides_no_run(tmp_path: Path) -> None:
    make_run(tmp_path / "b")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert [path.name for path, _ in find_runs(tmp_path)] == ["b"]


@pytest.mark.parametrize("job_id", ["9" * 5000, "٣", "-7", "7_1"])
def test_a_job_number_that_is_none_is_a_run_that_is_gone(
    tmp_path: Path, squeue: tuple[dict[int, tuple[str, str, str, str, str]], Questions], job_id: str
) -> None:
    squeue[0][3] = squeue[0][7] = ("RUNNING", "", "", "", "")
    make_run(tmp_path / "run", job_id=job_id)
    assert state(tmp_path / "run") == "gone"


def test_a_run_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert state_of(Glance(root=tmp_path, error="no permission"), Seen(None)) == "no permission"


def test_a_file_that_is_no_snapshot_is_as_none(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "done")
    paths.status.write_bytes(b"\xff{")
    (paths.checkpoints / "step_999999").mkdir()
    run = glance(paths.root)
    assert state_of(run, None) == "done"
    assert run.checkpoint is not None
    assert run.checkpoint.name != "step_999999", "it has no manifest"


def test_a_run_whose_run_yaml_is_gone_is_listed_with_that_word(tmp_path: Path) -> None:
    run = make_run(tmp_path / "me/a")
    run.run_yaml.unlink()
    (tmp_path / "me/control").mkdir()  # of something else
    [found] = glance_at_all(tmp_path)
    assert (found.root, state_of(found, None)) == (run.root, "run.yaml is gone")
    assert found.job is not None
