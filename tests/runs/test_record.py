"""What is known of a run's jobs, from its journal."""

import json
import os
from pathlib import Path

import pytest

from tests.journals import append_event, read_events
from verl_slurm.base.errors import NotFound
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal import files
from verl_slurm.runs.glance import glance
from verl_slurm.runs.run_record import last_job


def journal(paths: RunPaths, *events: dict[str, object]) -> None:
    paths.events.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_the_newest_job_is_found_whoever_submitted_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(NotFound, match="no job yet"):
        last_job(paths)
    append_event(paths, "submitted", job_id="7", cluster="local", host="here")
    assert (last_job(paths).job_id, last_job(paths).cluster, last_job(paths).host) == ("7", "local", "here")
    append_event(paths, "submitted", job_id="8", cluster="slurm", host="here")
    append_event(paths, "started", job_id="9")
    assert (last_job(paths).job_id, last_job(paths).cluster) == ("9", "slurm")


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.events.write_bytes(b'{"event": "started"}\n{"event": "end')
    assert [event["event"] for event in read_events(paths)] == ["started"]


def test_a_damaged_line_costs_that_line_alone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.events.write_bytes(b'{"event": "started"}\nrubbish\n{"event": "ended"}\n')
    assert [event["event"] for event in read_events(paths)] == ["started", "ended"]


def test_a_requeue_is_no_end(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    started: dict[str, object] = {"event": "started", "job_id": "7"}
    journal(paths, started, {"event": "ended", "job_id": "7", "exit_code": 25})
    assert not files.read_history(paths).has_ended(last_job(paths).job_id)
    journal(paths, started, {"event": "ended", "job_id": "7", "exit_code": 0})
    assert files.read_history(paths).has_ended(last_job(paths).job_id)
    journal(paths, started, {"event": "ended", "job_id": "7", "exit_code": 0}, started)
    assert not files.read_history(paths).has_ended(last_job(paths).job_id)


def test_a_job_that_an_emptied_journal_does_not_name_is_found(tmp_path: Path) -> None:
    """Otherwise `submit` would queue a second one beside it."""
    paths = RunPaths(tmp_path)
    private_dir(paths.logs)
    paths.events.touch()
    script = paths.logs / "7_submission.sh"
    script.write_text("#!/bin/bash\n#SBATCH --job-name=x\n")
    (paths.logs / "99_submission.sh").write_text("")  # submitit's for a local job
    assert (last_job(paths).job_id, last_job(paths).cluster) == ("7", "slurm")
    take_attempt(paths, job_id="8", restart=0, cluster="slurm")
    os.utime(script, (1, 1))
    job = glance(tmp_path).job
    assert job is not None
    assert (job.job_id, last_job(paths).job_id) == ("8", "8")
