"""The journal as memory: what it counts, what it survives."""

from pathlib import Path

import pytest
from verl_slurm_daemon.journal import Journal, stuck_starts

from verl_slurm.errors import CheckpointCorrupt
from verl_slurm.events import read_events
from verl_slurm.paths import RunPaths


def generation(progress: str) -> dict[str, object]:
    return {"event": "generation", "progress": progress}


CRASH = {"event": "crash"}


def test_events_are_read_back_in_order_with_epoch_and_job(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    journal = Journal(paths, epoch=2, job_id="17")
    journal.event("cause", cause="preemption", evidence='says "it"\nand more')
    journal.event("ended", exit_code=25)
    first, last = read_events(paths)
    assert (first["epoch"], first["job_id"], first["evidence"]) == (2, "17", 'says "it"\nand more')
    assert last["exit_code"] == 25


def test_one_event_stays_one_line_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal(RunPaths(tmp_path), epoch=1, job_id="1").event("crash", detail="a\nb\x1b[31m\u2028c")
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_last_line_cut_by_a_power_loss_is_left_out(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    Journal(paths, epoch=1, job_id="1").event("started")
    with paths.events.open("ab") as file:
        file.write(b'{"event": "gener')
    assert [e["event"] for e in read_events(paths)] == ["started"]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.events.write_bytes(b"{nonsense\n{}\n")
    with pytest.raises(CheckpointCorrupt, match="events.jsonl:1"):
        read_events(paths)


def test_crashes_at_the_same_place_are_counted() -> None:
    assert stuck_starts([generation("a"), CRASH, generation("a"), CRASH]) == 2


def test_progress_forgives_earlier_crashes() -> None:
    assert stuck_starts([generation("a"), CRASH, generation("b"), CRASH]) == 1


def test_a_preemption_is_not_a_crash() -> None:
    assert stuck_starts([generation("a"), generation("a"), generation("a")]) == 0
