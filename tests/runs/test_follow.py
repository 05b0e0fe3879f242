"""Following a file that grows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.lines import follow_lines
from tests.many_runs import make_run
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.events import Ended, Event, Gone, Started, Submitted, Warned
from verl_slurm.journal.files import append_event
from verl_slurm.runs import follow
from verl_slurm.runs.follow import follow_run
from verl_slurm.runs.liveness import JobState


def test_lines_come_as_they_are_finished(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = follow_lines(path, silence_s=lambda: 0.01)
    assert next(lines) is None  # the file is not there yet, and nothing came in time
    path.write_bytes(b"one\ntw")
    assert next(lines) == b"one"
    assert next(lines) is None
    with path.open("ab") as file:
        file.write(b"o\n\nthree\n")
    assert [next(lines) for _ in range(3)] == [b"two", b"", b"three"]
    lines.close()


def test_history_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"old\nnew\n")
    lines = follow_lines(path, 4, silence_s=lambda: 60.0)
    assert next(lines) == b"new"
    lines.close()


def test_reading_does_not_wake_the_reader(tmp_path: Path) -> None:
    """inotify reports our own open and close; had they rung, this would never fall silent."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"")
    lines = follow_lines(path, silence_s=lambda: 0.2)
    assert next(lines) is None
    lines.close()


def test_the_file_beside_is_looked_at_when_it_changes(tmp_path: Path) -> None:
    path, beside = tmp_path / "events.jsonl", tmp_path / "status.json"
    seen: list[bytes] = []
    beside.write_bytes(b"first")
    lines = follow_lines(
        path, silence_s=lambda: 0.2, beside=beside, on_beside=lambda: seen.append(beside.read_bytes())
    )
    assert next(lines) is None
    beside.with_suffix(".tmp").write_bytes(b"second")
    beside.with_suffix(".tmp").rename(beside)
    assert next(lines) is None
    assert (seen[0], seen[-1]) == (b"first", b"second")
    lines.close()


def test_an_error_of_who_is_told_is_not_taken_for_a_missing_journal(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "a", job_id="1")

    def told(_: Event) -> None:
        raise FileNotFoundError("of the caller's own file")

    with pytest.raises(FileNotFoundError, match="own file"):
        follow_run(paths, 0, told)


def test_a_job_that_ends_before_submit_says_its_word_has_ended_with_its_own_code(tmp_path: Path) -> None:
    paths, told = RunPaths(private_dir(tmp_path / "run")), list[Event]()
    for event in (
        Started(attempt=1, job_id="7"),
        Ended(0, "done", job_id="7"),
        Submitted("local", job_id="7"),
    ):
        append_event(paths, event)
    assert follow_run(paths, 0, told.append) == ExitCode.OK
    assert [type(event).__name__ for event in told] == ["Started", "Ended", "Submitted"]


@contextmanager
def silent(*_: object) -> Iterator[Callable[[float], bool]]:
    yield lambda patience_s: False


def test_a_job_that_was_requeued_after_its_end_is_followed_and_one_that_lingers_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, told = make_run(tmp_path / "a", "failed", job_id="1"), list[Event]()
    monkeypatch.setattr(follow, "watched", silent)
    lingers = JobState(state="RUNNING", over=False, since=datetime(2026, 11, 1, tzinfo=UTC))
    waits = JobState(state="PENDING", over=False, waits=True)
    for last, code in ((lingers, ExitCode.CRASHED), (JobState(state="CANCELLED", over=True), 23)):
        answers = iter([lingers] if last is lingers else [waits, waits, last])
        monkeypatch.setattr(follow, "job_state", lambda *_, answers=answers: next(answers))
        told.clear()
        assert follow_run(paths, 0, told.append) == code
        assert next(answers, None) is None
        assert any(isinstance(event, Gone) for event in told) == (last is not lingers)
    [warned] = (event.text for event in told if isinstance(event, Warned))
    assert "job 1 was requeued after its end (failed with 22)" in warned
    assert f"`verl-slurm cancel {paths.root}` ends it" in warned


def test_a_job_that_stands_until_somebody_acts_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_run(tmp_path / "a", job_id="1")
    held, limit = (
        JobState(state="PENDING", over=False, detail=f"{reason}; scontrol {way}", way_on=f"scontrol {way}")
        for reason, way in (("JobHeldUser", "release 1"), ("PartitionTimeLimit", "update JobId=1"))
    )
    waits = JobState(state="PENDING", over=False, detail="Resources")
    left = JobState(state="PENDING", over=False, waits=True, left="waits, since n1 has no python")
    hidden = JobState(state="UNKNOWN", over=False, detail="Slurm shows you no jobs of other users")
    over = JobState(state="CANCELLED", over=True)
    answers, told = iter([waits, hidden, held, held, limit, waits, left, left, over]), list[Event]()
    monkeypatch.setattr(follow, "watched", silent)
    monkeypatch.setattr(follow, "job_state", lambda *_: next(answers))
    follow_run(paths, paths.events.stat().st_size, told.append)
    assert [event.text if isinstance(event, Warned) else type(event) for event in told] == [
        "1 stands still: JobHeldUser; scontrol release 1",
        "1 stands still: PartitionTimeLimit; scontrol update JobId=1",
        "1 waits, since n1 has no python",
        Gone,
    ]
