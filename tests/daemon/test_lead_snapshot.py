"""What a lead that takes a run over puts into the snapshot, before its ranks have said anything."""

from pathlib import Path
from typing import Any

from verl_slurm_daemon.allocation.local import LocalAllocation
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.lead_loop import Lead

from tests.journals import make_event, read_events
from tests.many_runs import Teller, make_run
from verl_slurm.base.one_line import json_line
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import parse_config
from verl_slurm.journal.status import read_status

CONFIG = parse_config(b"name: run\nmodel: {path: m}\ndata: {root: d}\n", "run.yaml")


def takes_over(paths: RunPaths) -> tuple[Lead, Journal]:
    lead = Lead(paths, CONFIG, LocalAllocation(CONFIG, paths))
    journal = Journal(paths, attempt=9, job_id="7", heard=lead._journaled)
    lead._status.attempt = 9
    lead._take_over(9)
    return lead, journal


def test_the_step_survives_a_requeue_and_follows_the_checkpoint_that_it_goes_back_to(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "queued", num_events=300)
    lead, journal = takes_over(paths)
    journal.status(lead._status)
    former = read_status(paths)["step"]
    assert former > 100
    # By it is judged whether the ledger still has what was recorded.
    assert (lead._status.phase, lead._status.index) == ("generate", 3)
    journal.write(make_event("restart", number=1, resume="step_000042_sp0007"))
    assert (lead._status.step, lead._status.last_checkpoint) == (42, "step_000042_sp0007")
    assert (lead._status.phase, lead._status.index) == ("", 0)
    journal.write(make_event("restart", number=2, resume=None))
    assert (lead._status.step, lead._status.last_checkpoint) == (0, "")


def test_the_sum_of_the_interruptions_goes_on_where_the_former_lead_left_it(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "queued", num_events=300)
    former = read_status(paths)
    lead, journal = takes_over(paths)
    journal.write(make_event("started", cluster="local"))
    waiting = (lead._status.interruptions, lead._status.last_interruption["seconds"])
    assert waiting == (former["interruptions"], None)
    for event in ("restart", "training", "first_rollout"):
        journal.write(make_event(event))
    assert lead._status.interruptions == former["interruptions"]
    assert lead._status.last_interruption["seconds"] > 0
    assert lead._status.interrupted_s > former["interrupted_s"]


def test_a_run_that_begins_has_gone_through_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.run_yaml.touch()
    lead, journal = takes_over(paths)
    journal.write(make_event("started", cluster="local"))
    journal.status(lead._status)
    status: dict[str, Any] = read_status(paths)
    assert (status["step"], status["interruptions"], status["last_interruption"]) == (0, 0, {})
    assert len(read_events(paths)) == 1


def test_what_a_snapshot_says_of_many_interruptions_stays_small(tmp_path: Path) -> None:
    teller = Teller("7", "slurm")
    teller.start()
    for _ in range(200):
        teller.preempt()
        teller.start()
    paths = make_run(tmp_path / "run", num_events=60)
    paths.events.write_bytes(b"".join(json_line(event) + b"\n" for event in teller.events))
    lead, journal = takes_over(paths)
    journal.write(make_event("started", cluster="local"))
    journal.status(lead._status)
    assert paths.status.stat().st_size < 2000
