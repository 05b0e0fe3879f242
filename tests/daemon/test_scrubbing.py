"""The daemon's slow scrub: what is due by the journal, and what a damaged checkpoint leads to."""

import errno
import os
from pathlib import Path

import pytest

from tests.checkpoint.conftest import strew
from tests.checkpoint.sealed import KEYS, save_sealed
from tests.cli.test_checkpoints import make_run, save
from verl_slurm.base.errors import Fenced
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store import scrub
from verl_slurm.checkpoint.store.frozen import store_frozen
from verl_slurm.checkpoint.store.scrub import scrub_next
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.dataset.fingerprint.data_record import fingerprint
from verl_slurm.journal.files import append_event, read_history

CONFIG = CheckpointConfig(scrub_every_h=1.0)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = make_run(tmp_path / "run")
    save(paths, 10)
    save(paths, 20)
    return paths


def _attempt(run: RunPaths) -> int:
    return take_attempt(run, job_id="1", restart=0).attempt


def test_each_is_read_back_once_and_then_not_before_its_time(run: RunPaths) -> None:
    attempt = _attempt(run)
    now = 2_000_000_000.0
    names = []
    for _ in range(2):
        pause, told = scrub_next(run, CONFIG, attempt, now)
        assert (pause, told.good) == (0.0, True)
        names.append(told.name)
        append_event(run, told)
    assert names == ["step_000020", "step_000010"]
    now = max(read_history(run).judged_at.values())
    pause, told = scrub_next(run, CONFIG, attempt, now)
    assert told is None
    assert 3000 < pause <= 3600


def test_a_checkpoint_that_rotted_is_set_aside_and_the_next_is_read(run: RunPaths) -> None:
    attempt = _attempt(run)
    (run.checkpoint(20) / "metadata.json").write_bytes(b"[]")
    pause, told = scrub_next(run, CONFIG, attempt, 2e9)
    assert (told.name, told.good, pause) == ("step_000020", False, 0.0)
    assert "metadata.json" in told.detail
    assert not run.checkpoint(20).exists()
    assert any(run.quarantine.iterdir())
    assert scrub_next(run, CONFIG, attempt, 2e9)[1].name == "step_000010"


def test_strays_are_moved_out_of_a_checkpoint_that_is_whole(run: RunPaths) -> None:
    attempt = _attempt(run)
    strew(run.checkpoint(20))
    pause, told = scrub_next(run, CONFIG, attempt, 2e9)
    assert (told.name, told.good, pause) == ("step_000020", True, 0.0)
    assert f"moved to {run.quarantine / 'strays.step_000020.'}" in told.detail
    append_event(run, told)
    assert scrub_next(run, CONFIG, attempt, 2e9)[1].name == "step_000010"
    assert verify(run.checkpoint(20)).ok


def test_one_that_lost_its_manifest_is_read_too(run: RunPaths) -> None:
    attempt = _attempt(run)
    (run.checkpoint(20) / "manifest.json").unlink()
    _, told = scrub_next(run, CONFIG, attempt, 2e9)
    assert (told.name, told.good) == ("step_000020", False)
    assert "manifest.json: missing" in told.detail
    assert not run.checkpoint(20).exists()


def test_one_that_cannot_be_set_aside_is_named_and_keeps_no_other_from_its_turn(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scrub, "move_to_quarantine", full)
    attempt, told = _attempt(run), []
    (run.checkpoint(20) / "metadata.json").write_bytes(b"[]")
    for _ in range(2):
        told.append(scrub_next(run, CONFIG, attempt, 2e9)[1])
        append_event(run, told[-1])
    assert [(one.name, one.good) for one in told] == [("step_000020", False), ("step_000010", True)]
    assert "not set aside: [Errno 28] No space left" in told[0].detail


def test_what_others_may_write_is_said_and_left(run: RunPaths) -> None:
    attempt = _attempt(run)
    (run.checkpoint(20) / "metadata.json").chmod(0o666)
    pause, told = scrub_next(run, CONFIG, attempt, 2e9)
    assert not told.good
    assert pause > 0
    assert run.checkpoint(20).exists()


def test_what_is_not_signed_with_the_runs_key_is_said_left_and_keeps_no_other_from_its_turn(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run")
    save_sealed(run, 10)
    planted = save_sealed(run, 20, None)
    attempt, names = _attempt(run), []
    for _ in range(2):
        _, told = scrub_next(run, CONFIG, attempt, 2e9, KEYS)
        names.append((told.name, told.good))
        append_event(run, told)
    assert names == [("step_000020", False), ("step_000010", True)]
    assert planted.is_dir()
    assert scrub_next(run, CONFIG, attempt, max(read_history(run).judged_at.values()), KEYS)[1] is None


def test_a_frozen_model_has_its_turn_after_the_checkpoints(run: RunPaths, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes(b"{}")
    stored = store_frozen(run, tmp_path / "model", fingerprint(tmp_path / "model"))
    (stored / "config.json").write_bytes(b"[]")
    attempt, told = _attempt(run), []
    for _ in range(3):
        told.append(scrub_next(run, CONFIG, attempt, 2e9)[1])
        append_event(run, told[-1])
    assert [found.name for found in told] == ["step_000020", "step_000010", f"frozen/{stored.name}"]
    assert not told[-1].good
    assert not stored.exists()


def test_a_fenced_lead_sets_nothing_aside(run: RunPaths) -> None:
    attempt = _attempt(run)
    take_attempt(run, job_id="2", restart=0)
    (run.checkpoint(20) / "metadata.json").write_bytes(b"[]")
    with pytest.raises(Fenced):
        scrub_next(run, CONFIG, attempt, 2e9)
    assert run.checkpoint(20).exists()


def test_lines_of_the_journal_that_make_no_sense_are_passed_over(run: RunPaths) -> None:
    lines = (
        b'{"event":"scrubbed","name":3,"good":true,"time":"2026-11-01T08:00:00+00:00"}',
        b'{"event":"scrubbed","name":"step_000010","good":"yes","time":"2026-11-01T08:00:00+00:00"}',
        b'{"event":"verified","name":"step_000010","time":"?"}',
    )
    run.events.write_bytes(b"\n".join(lines) + b"\n")
    assert read_history(run).judged_at == {}
