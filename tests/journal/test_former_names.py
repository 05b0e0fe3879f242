"""Files of runs that began under a former version, which called an attempt `epoch` and a restart `generation`."""

import json
from pathlib import Path

from verl_slurm.base.paths import RunPaths
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import parse_event, to_json
from verl_slurm.journal.folds.outages import Outages
from verl_slurm.journal.status import Status, read_status
from verl_slurm.journal.steps import append_step, last_steps

NOW = "2026-11-01T08:01:43.000+00:00"
STARTED = (
    b'{"event":"started","time":"2026-11-01T08:01:43.000+00:00","epoch":2,"job_id":"7","cluster":"slurm",'
    b'"host":"n1","restart":1,"nodes":"n[1-2]","pid":4242}'
)


def test_an_attempt_and_a_restart_of_a_former_version_are_read_under_their_present_names() -> None:
    started = ev.Started("slurm", "n1", 1, "n[1-2]", 4242, time=NOW, attempt=2, job_id="7")
    assert parse_event(STARTED) == started
    restart = parse_event(b'{"event": "generation", "time": "", "epoch": 2, "number": 3, "resume": null}')
    assert restart == ev.Restart(3, attempt=2)
    assert to_json(restart) == {"event": "restart", "attempt": 2, "number": 3}


def test_an_unknown_kind_keeps_what_only_another_kind_called_otherwise() -> None:
    event = parse_event(b'{"event": "news", "epoch": 2, "restart": 4, "nested": {"epoch": 1}}')
    assert event == ev.Other("news", {"restart": 4, "nested": {"epoch": 1}}, attempt=2)


def test_a_former_line_that_does_not_fit_is_read_as_it_is() -> None:
    event = parse_event(b'{"event": "started", "epoch": 2, "restart": "x"}')
    assert event == ev.Other("started", {"requeues": "x"}, attempt=2)
    assert parse_event(b'{"event": "generation", "epoch": "x"}') == ev.Other("restart")
    assert parse_event(b'{"event": ["generation"], "epoch": 1}') is None


def test_a_text_with_a_former_name_in_it_stays_as_it_is() -> None:
    made = ev.Crash('"epoch": 3 is "generation"', time=NOW, attempt=2)
    assert parse_event(json.dumps(to_json(made)).encode()) == made


def test_an_outage_between_a_former_and_a_present_version_is_one() -> None:
    former = parse_event(STARTED)
    assert former is not None
    later = ev.Started(time="2026-11-01T09:01:43.000+00:00", attempt=3)
    (one,) = Outages([former, later]).each
    assert (one.cause, one.queue_s) == ("lead_lost", 3600.0)


def test_the_snapshot_of_a_former_daemon_has_the_present_names(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    former = {"state": "running", "job_id": "7", "epoch": 2, "generation": 3, "restarts": 1, "step": 4}
    paths.status.write_text(json.dumps(former))
    found = read_status(paths)
    assert found == {"state": "running", "job_id": "7", "attempt": 2, "restart": 3, "requeues": 1, "step": 4}
    assert found.keys() <= set(Status.__struct_fields__)


def test_the_rows_of_former_steps_name_their_attempt(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.steps.write_text('{"time": "", "epoch": 1, "step": 1, "reward": 0.5}\n')
    append_step(paths, 2, {"step": 2, "epoch": 0.25})  # the last one: a loop's own number
    former, present = last_steps(paths, 5)
    assert (former["attempt"], "epoch" in former) == (1, False)
    assert (present["attempt"], present["epoch"]) == (2, 0.25)
