"""What tells that a run had a checkpoint, once it has none: each trace alone is enough."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import begun_run, run_config, write_manifest
from tests.journals import append_event
from verl_slurm.base.errors import CheckpointsAbsent, CheckpointsLost, TierError
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.checkpoint.store.lost import (
    former_checkpoint,
    gone_back,
    lost_error,
    lost_rollouts,
    newest_attempt,
    require_never_saved,
    require_run_id,
)
from verl_slurm.checkpoint.store.quarantine import move_to_quarantine
from verl_slurm.checkpoint.store.run_config import note_trained_with
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.files import read_history
from verl_slurm.journal.steps import append_step
from verl_slurm.runtime_state.samples import append_samples
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
    (paths.logs / "attempt_000001.restart_01.node_0000.log").touch()
    return paths


def ledger(paths: RunPaths, attempt: int, *steps: int) -> None:
    private_dir(paths.ledger)
    data = head(attempt, 0) + b"".join(frame(run_id(paths), step, 0, b"rollout") for step in steps)
    paths.ledger_segment(attempt, 0).write_bytes(data)


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
    "only logs": (
        lambda run: [
            shutil.rmtree(run.ledger),
            run.steps.unlink(),
            run.events.unlink(),
            append_event(run, "submitted", job_id="2"),  # so the owner's number tells nothing
        ],
        "the journal has lost 1 attempt",
    ),
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
    require_never_saved(run, CONFIG, take_attempt(run, job_id="1", restart=1).attempt)


@pytest.mark.parametrize("trace", TRACES)
def test_each_trace_of_a_checkpoint_alone_is_enough(run: RunPaths, trace: str) -> None:
    leave, told = TRACES[trace]
    leave(run)
    assert told in former_checkpoint(run, CONFIG)
    with pytest.raises(CheckpointsLost, match="--force-resume"):
        require_never_saved(run, CONFIG, take_attempt(run, job_id="1", restart=1).attempt)


def test_a_first_save_that_was_damaged_when_it_was_read_back_was_never_one(run: RunPaths) -> None:
    append_event(run, "saved", name="step_000003")
    append_event(run, "corrupt", name="step_000003")
    set_aside(run)
    assert former_checkpoint(run, CONFIG) == ""


def test_a_run_that_was_told_to_begin_again_does_and_a_checkpoint_that_was_named_is_missed(
    run: RunPaths,
) -> None:
    with pytest.raises(CheckpointsLost, match="resume_from names /gone"):
        require_never_saved(run, run_config(resume_from="/gone"), 1)
    append_event(run, "verified", name="step_000003")
    run.from_nothing.touch()
    assert former_checkpoint(run, CONFIG) == ""


def test_a_directory_that_may_not_be_mounted_is_told_apart(run: RunPaths) -> None:
    assert isinstance(lost_error(run, "x"), CheckpointsAbsent)
    private_dir(run.checkpoints)
    assert isinstance(lost_error(run, "x"), CheckpointsAbsent)
    run.latest.write_text("step_000003\n")  # the hint alone: what it names may be hidden
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


def test_a_lost_run_id_is_refused_with_the_one_that_the_journal_names(run: RunPaths) -> None:
    shutil.rmtree(run.ledger)
    number = run_id(run)
    append_event(run, "submitted", job_id="1")
    require_run_id(run)
    run.run_id.unlink()
    with pytest.raises(TierError, match=f"its journal bears it.*echo {number} > {run.run_id}"):
        require_run_id(run)


def test_a_lost_run_id_is_refused_with_the_one_that_its_checkpoints_name(tmp_path: Path) -> None:
    paths = begun_run(tmp_path / "run")
    write_manifest(private_dir(paths.checkpoints / "step_000003"), 3)
    number = run_id(paths)
    paths.run_id.unlink()
    with pytest.raises(TierError, match=f"{number}, as step_000003.*echo {number} > {paths.run_id}"):
        require_run_id(paths)
    with pytest.raises(TierError, match="its checkpoints bear it"):
        run_id(paths)
    assert not paths.run_id.exists()


def test_a_lost_run_id_is_refused_where_tiers_hold_copies(run: RunPaths) -> None:
    run.run_id.unlink()
    shutil.rmtree(run.ledger)
    private_dir(run.control)
    run.tier_records.write_text(json.dumps({"tiers": {"cold": {"step_000003": {}}}}))
    with pytest.raises(TierError, match=r"step_000003 was in tier cold.*PREFIX/NAME-ID"):
        require_run_id(run)


def back_from(run: RunPaths, present: str = "step_000002") -> str:
    return gone_back(run, read_history(run), present)


@pytest.fixture
def saved(run: RunPaths) -> RunPaths:
    """Four checkpoints, by its journal."""
    for step in range(1, 5):
        append_event(run, "saved", name=f"step_{step:06d}")
        append_event(run, "verified", name=f"step_{step:06d}")
    return run


def test_a_newer_checkpoint_that_is_gone_is_named_with_the_steps_done_again(saved: RunPaths) -> None:
    again = "the run goes back to step_000002, and does steps 3 and 4 again"
    assert back_from(saved) == f"step_000004 was verified and is gone: {again}"
    private_dir(saved.checkpoints / "step_000004")  # without its manifest
    assert back_from(saved) == f"step_000004 was verified and is no longer what was saved: {again}"
    move_to_quarantine(saved.checkpoints / "step_000004", ["damaged"])
    assert back_from(saved).startswith("step_000004 was verified and is set aside in")
    assert back_from(saved, "step_000003").endswith("does step 4 again")
    append_event(saved, "saved", name="step_000004_sp0007")
    assert "step_000004_sp0007 was saved" in back_from(saved)
    assert back_from(saved, "step_000001").endswith("does steps 2 to 5 again")


@pytest.mark.parametrize(
    "event",
    [
        ("restart", {"number": 1, "resume": "step_000002"}),
        ("force_resume", {"lost": "x"}),
        # Never a checkpoint, or removed while newer ones were there.
        ("corrupt", {"name": "step_000005"}),
        ("pruned", {"name": "step_000005"}),
    ],
)
def test_what_was_told_or_is_no_loss_is_not_told(saved: RunPaths, event: tuple[str, dict[str, Any]]) -> None:
    kind, fields = event
    append_event(saved, "saved", name="step_000005")
    append_event(saved, kind, **fields)
    assert back_from(saved, "step_000002" if "name" not in fields else "step_000004") == ""


def test_what_the_newest_was_is_known_without_a_journal_and_one_of_the_nodes_is_not_called_gone(
    saved: RunPaths,
) -> None:
    append_event(saved, "saved", name="step_000005", on_shared=False)
    assert back_from(saved, "step_000004") == ""
    # By the snapshot where the journal was emptied, by the hint of a loop without a daemon.
    saved.events.write_bytes(b"")
    (saved.checkpoints / "latest").write_text("step_000004\n")
    assert "step_000004 was saved and is gone" in gone_back(saved, None, "step_000002")
    saved.status.write_text('{"last_checkpoint": "step_000004"}')
    assert "step_000004 was verified and is gone" in back_from(saved)


# Four micro-batches of two responses on each of two ranks: eight in a step.
SHAPE = run_config(ranks=2, sizes=(8, 8, 8), sampled_at_once=2, steps=9)


@pytest.fixture
def sampling(tmp_path: Path) -> RunPaths:
    """Killed while it scored the second step."""
    paths = begun_run(tmp_path / "run")
    note_trained_with(paths, SHAPE)
    append_event(paths, "restart", attempt=1, number=1, progress="start+0")
    append_event(paths, "first_rollout", attempt=1, phase="generate", index=1)
    for rank in (0, 1):
        record(paths, rank, *((step, 2 * piece + rank) for step in (0, 1) for piece in range(4)))
    at(paths, 1, "score", 1)
    return paths


def record(paths: RunPaths, rank: int, *keys: tuple[int, int]) -> None:
    private_dir(paths.ledger)
    data = b"".join(frame(run_id(paths), step, number, b"rollout") for step, number in keys)
    paths.ledger_segment(1, rank).write_bytes(head(1, rank) + data)


def at(paths: RunPaths, step: int, phase: str, index: int) -> None:
    paths.status.write_text(json.dumps({"attempt": 1, "step": step, "phase": phase, "index": index}))


def sampled_again(run: RunPaths, present: str = "", config: RunConfig = SHAPE) -> str:
    return lost_rollouts(run, config, read_history(run), present)


@pytest.mark.parametrize(
    ("present", "rank", "keys", "number"),
    [
        ("", 0, [], 16),
        ("step_000001", 0, [], 8),
        ("step_000001", 1, [(1, 1)], 6),
        ("step_000001_sp0003", 1, [(1, 1), (1, 3), (1, 5)], 2),
        # The checkpoint holds them itself.
        ("step_000001_sp0004", 1, [], 0),
        ("step_000002", 1, [], 0),
    ],
)
def test_finished_responses_that_the_ledger_has_no_more_are_counted(
    sampling: RunPaths, present: str, rank: int, keys: list[tuple[int, int]], number: int
) -> None:
    assert sampled_again(sampling, present) == ""
    record(sampling, rank, *keys)
    words = (
        f"at least {number} finished responses are not in {sampling.ledger} any more: they are sampled again"
    )
    assert sampled_again(sampling, present) == (words if number else "")
    append_event(sampling, "warning", topic="rollouts", text=words)
    append_event(sampling, "restart", attempt=2, number=1, resume=present or None)
    assert sampled_again(sampling, present) == "", "told once"


def test_ranks_that_are_one_piece_short_have_lost_nothing_and_without_a_snapshot_there_is_no_number(
    sampling: RunPaths,
) -> None:
    at(sampling, 1, "generate", 3)
    record(sampling, 1, (0, 1), (0, 3), (0, 5), (0, 7), (1, 1), (1, 3))
    assert sampled_again(sampling) == ""
    sampling.status.unlink()
    assert sampled_again(sampling) == ""
    shutil.rmtree(sampling.ledger)
    assert sampled_again(sampling).startswith("an unknown number of finished responses")


GUEST = run_config(backend="verl", entry="ppo")


@pytest.fixture
def guest(tmp_path: Path) -> RunPaths:
    """Two processes that record responses, single turns and tokens."""
    paths = begun_run(tmp_path / "run")
    append_event(paths, "restart", attempt=1, number=1, progress="start+100")
    append_event(paths, "training", attempt=1, phase="step_end")
    for place in (paths, RunPaths(paths.ledger / "turns"), RunPaths(paths.ledger / "tokens")):
        private_dir(place.ledger)
        for rank in (0, 1):
            place.ledger_segment(1, rank).write_bytes(head(1, rank))
    record(paths, 0, (7, 0))
    return paths


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (lambda run: run.ledger_segment(1, 0).unlink(), "an unknown number of finished responses"),
        (lambda run: run.ledger_segment(1, 1).unlink(), "an unknown number of finished responses"),
        (lambda run: run.ledger_segment(1, 1).write_bytes(b""), "an unknown number of finished responses"),
        (lambda run: shutil.rmtree(run.ledger), "an unknown number of finished responses"),
        (
            lambda run: [path.unlink() for path in (run.ledger / "tokens").rglob("*.ledger")],
            "the log of tokens is gone",
        ),
    ],
)
def test_what_verl_had_recorded_is_missed(
    guest: RunPaths, lose: Callable[[RunPaths], object], said: str
) -> None:
    assert sampled_again(guest, config=GUEST) == ""
    lose(guest)
    assert sampled_again(guest, config=GUEST).startswith(said)


def test_a_loop_that_keeps_no_ledger_has_lost_none(guest: RunPaths) -> None:
    shutil.rmtree(guest.ledger)
    private_dir(guest.ledger)
    append_event(guest, "restart", attempt=2, number=1, progress="step_000001")
    append_event(guest, "training", attempt=2, phase="step_end")
    assert sampled_again(guest, config=run_config(backend="command", command=("train.py",))) == ""


@pytest.mark.parametrize(
    "bear",
    [
        lambda run: append_event(run, "saved", attempt=7, name="step_000003"),
        lambda run: run.status.write_text('{"attempt": 7}'),
        lambda run: ledger(run, 7, 0),
        lambda run: (run.logs / "attempt_000007.node_0000.agent.log").touch(),
        lambda run: run.work(7).mkdir(parents=True),
        lambda run: write_manifest(private_dir(run.checkpoints / "step_000003"), 3, attempt=7),
    ],
    ids=["journal", "snapshot", "ledger", "log", "work", "checkpoint"],
)
def test_the_newest_attempt_is_known_by_each_thing_that_bears_its_number(
    run: RunPaths, bear: Callable[[RunPaths], object]
) -> None:
    (run.logs / "attempt_99999999999.log").touch()  # no number of an attempt
    assert newest_attempt(run) == 1
    bear(run)
    assert newest_attempt(run) == 7


def test_a_lost_run_id_is_refused_with_the_one_that_the_samples_name(tmp_path: Path) -> None:
    paths = begun_run(tmp_path / "run")
    number = run_id(paths)
    append_samples(paths, 1, 1, 0, [])
    paths.run_id.unlink()
    with pytest.raises(TierError, match=f"samples bear it.*echo {number} > {paths.run_id}"):
        require_run_id(paths)
