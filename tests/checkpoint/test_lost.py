"""What tells that a run had a checkpoint, once it has none: each trace alone is enough."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import begun_run, run_config
from tests.journals import append_event
from verl_slurm.base.errors import CheckpointsAbsent, CheckpointsLost, TierError
from verl_slurm.base.fence import take_epoch
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.checkpoint.store.lost import (
    former_checkpoint,
    lost_error,
    require_never_saved,
    require_run_id,
)
from verl_slurm.checkpoint.store.quarantine import move_to_quarantine
from verl_slurm.journal.steps import append_step
from verl_slurm.runtime_state.segment import frame, head

CONFIG = run_config()


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Killed in step 5, before its first save."""
    paths = begun_run(tmp_path / "run")
    private_dir(paths.logs)
    append_event(paths, "submitted", job_id="1")
    append_event(paths, "started", attempt=1, job_id="1")
    append_event(paths, "restart", attempt=1, number=1, progress="start+0")
    append_event(paths, "first_rollout", attempt=1)
    for step in range(1, 6):
        append_step(paths, 1, {"step": step})
    ledger(paths, 1, *range(5))
    (paths.logs / "epoch_000001.gen_01.node_0000.log").touch()
    return paths


def ledger(paths: RunPaths, epoch: int, *steps: int) -> None:
    private_dir(paths.ledger)
    data = head(epoch, 0) + b"".join(frame(run_id(paths), step, 0, b"rollout") for step in steps)
    paths.ledger_segment(epoch, 0).write_bytes(data)


def set_aside(paths: RunPaths) -> None:
    move_to_quarantine(private_dir(paths.checkpoints / "step_000003"), ["damaged"])


TRACES: dict[str, tuple[Callable[[RunPaths], object], str]] = {
    "verified": (
        lambda run: append_event(run, "verified", name="step_000003"),
        "the journal: verified step_000003",
    ),
    "saved": (lambda run: append_event(run, "saved", name="step_000003"), "the journal: saved step_000003"),
    "resumed": (
        lambda run: append_event(run, "restart", number=2, resume="step_000003"),
        "resumed from step_000003",
    ),
    "quarantine": (set_aside, "step_000003 is in quarantine"),
    "torn": (lambda run: private_dir(run.checkpoints / "step_000003"), "step_000003, which cannot be used"),
    "latest": (
        lambda run: (private_dir(run.checkpoints) / "latest").write_text("step_000003\n"),
        "checkpoints/latest names step_000003",
    ),
    "copy": (lambda run: private_dir(run.resharded.checkpoints / "step_000003"), "a copy of step_000003"),
    "tier": (
        lambda run: run.tier_records.write_text(json.dumps({"tiers": {"cold": {"step_000003": {}}}})),
        "step_000003 was in tier cold",
    ),
    "snapshot": (
        lambda run: run.status.write_text('{"last_checkpoint": "step_000003"}'),
        "status.json names step_000003",
    ),
    "steps": (
        lambda run: [append_event(run, "started", attempt=2), append_step(run, 2, {"step": 4})],
        "attempt 2 went on after step 3",
    ),
    "ledger": (lambda run: ledger(run, 1, 3, 4), "the ledger begins after step 3"),
    "ledger gone": (lambda run: shutil.rmtree(run.ledger), "rollouts were recorded, and the ledger has none"),
    "zeros": (
        lambda run: run.events.write_bytes(run.events.read_bytes() + bytes(9) + b"\n"),
        "a damaged line",
    ),
    "torn line": (
        lambda run: run.events.write_bytes(run.events.read_bytes() + b'"step_000003"\n'),
        "a damaged line",
    ),
    "emptied": (lambda run: run.events.write_bytes(b""), "the journal has lost 1 attempt"),
    "nothing left": (
        lambda run: [
            shutil.rmtree(run.ledger),
            shutil.rmtree(run.logs),
            run.steps.unlink(),
            run.events.unlink(),
        ],
        "the journal has lost 1 attempt",
    ),
}


def test_a_run_that_was_killed_before_its_first_save_never_had_one(run: RunPaths) -> None:
    assert former_checkpoint(run, CONFIG) == ""
    append_event(run, "started", attempt=2)
    require_never_saved(run, CONFIG, take_epoch(run, job_id="1", restart=1).epoch)


@pytest.mark.parametrize("trace", TRACES)
def test_each_trace_of_a_checkpoint_alone_is_enough(run: RunPaths, trace: str) -> None:
    leave, told = TRACES[trace]
    leave(run)
    assert told in former_checkpoint(run, CONFIG)
    with pytest.raises(CheckpointsLost, match="--force-resume"):
        require_never_saved(run, CONFIG, take_epoch(run, job_id="1", restart=1).epoch)


def test_a_first_save_that_was_damaged_when_it_was_read_back_was_never_one(run: RunPaths) -> None:
    append_event(run, "saved", name="step_000003")
    append_event(run, "corrupt", name="step_000003")
    set_aside(run)
    assert former_checkpoint(run, CONFIG) == ""


def test_a_run_that_was_told_to_begin_again_does(run: RunPaths) -> None:
    append_event(run, "verified", name="step_000003")
    run.from_nothing.touch()
    assert former_checkpoint(run, CONFIG) == ""


def test_a_checkpoint_that_was_named_and_never_resumed_from_is_missed(run: RunPaths) -> None:
    with pytest.raises(CheckpointsLost, match="resume_from names /gone"):
        require_never_saved(run, run_config(resume_from="/gone"), 1)


def test_a_directory_that_may_not_be_mounted_is_told_apart(run: RunPaths) -> None:
    assert isinstance(lost_error(run, "x"), CheckpointsAbsent)
    private_dir(run.checkpoints)
    assert isinstance(lost_error(run, "x"), CheckpointsAbsent)
    set_aside(run)
    assert not isinstance(lost_error(run, "x"), CheckpointsAbsent)


@pytest.mark.parametrize("text", [None, "", "0123"])
def test_a_lost_run_id_is_refused_with_the_one_that_the_ledger_names(run: RunPaths, text: str | None) -> None:
    number = run_id(run)
    require_run_id(run)
    run.run_id.unlink()
    if text is not None:
        run.run_id.write_text(text)
    with pytest.raises(TierError, match=f"echo {number} > {run.run_id}"):
        require_run_id(run)
    with pytest.raises(TierError):  # no process makes another one
        run_id(run)
    shutil.rmtree(run.ledger)
    if text is None:
        require_run_id(run)
        assert run_id(run) != number
    else:
        with pytest.raises(TierError, match="not a run's id"):
            require_run_id(run)


def test_a_lost_run_id_is_refused_where_tiers_hold_copies(run: RunPaths) -> None:
    run.run_id.unlink()
    shutil.rmtree(run.ledger)
    private_dir(run.control)
    run.tier_records.write_text(json.dumps({"tiers": {"cold": {"step_000003": {}}}}))
    with pytest.raises(TierError, match=r"step_000003 was in tier cold.*PREFIX/NAME-ID"):
        require_run_id(run)
