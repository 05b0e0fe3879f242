"""What a save takes: as measured, else as the size and the speed of the storage say, else nobody knows."""

from pathlib import Path

import pytest

from tests.builders import checkpoint_info
from tests.journals import append_event
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checks.storage_probe import PlaceReport
from verl_slurm.config.load import parse_config
from verl_slurm.journal.steps import append_step
from verl_slurm.loops.reach import reach
from verl_slurm.submit.checks.slurm_answers import save_time

CONFIG = parse_config(b"", "my.yaml", ())


def committed(num_bytes: int) -> list[CheckpointInfo]:
    return [checkpoint_info(10, path=Path("/run"), num_bytes=num_bytes, num_files=20)]


def disk(path: Path) -> PlaceReport:
    return PlaceReport(path=str(path), write_bytes_per_s=2e9)


def broken(path: Path) -> PlaceReport:
    return PlaceReport(path=str(path), problem="gone")


def test_what_was_measured_beats_what_is_expected(tmp_path: Path) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    found = save_time(CONFIG, paths, committed(10 * 10**9), probe=disk)
    assert found is not None
    assert found.seconds == 5.0
    append_event(paths, "saved", num_bytes=9, seconds=3.25, on_shared=True)
    found = save_time(CONFIG, paths, committed(10 * 10**9), probe=broken)
    assert found is not None
    assert found.seconds == 3.25
    # Storage is not tried for a state that is small.
    paths = RunPaths(private_dir(tmp_path / "small"))
    assert save_time(CONFIG, paths, committed(10**6), probe=disk) is None
    assert save_time(CONFIG, paths, [], probe=disk) is None  # nobody knows how large it will be
    assert save_time(CONFIG, paths, committed(10**10), probe=broken) is None


def test_a_guests_save_comes_behind_a_whole_step_with_the_margins_its_session_takes(tmp_path: Path) -> None:
    guest = parse_config(b"trainer: {backend: command, command: [a.py]}", "my.yaml", ())
    paths = RunPaths(private_dir(tmp_path / "run"))
    append_event(paths, "saved", num_bytes=9, seconds=4.0, on_shared=True)
    assert save_time(guest, paths, [], probe=broken) is None  # no step was measured
    for step, seconds in enumerate((500.0, 30.0, 30.0, 60.0, 30.0, 30.0), start=1):
        append_step(paths, 1, {"step": step, "step_s": seconds})
    found = save_time(guest, paths, [], probe=broken)
    assert found is not None
    assert found.seconds == pytest.approx(60.0 * 1.1 + 4.0 * 1.5)  # the first of six is too long ago
    assert "takes up to 60.0 s" in found.basis
    assert "a save of 4.0 s" in found.basis
    assert reach(seconds_left=found.seconds, running_s=0.0, steps_s=[60.0], save_s=4.0).ok
    assert not reach(seconds_left=found.seconds - 0.1, running_s=0.0, steps_s=[60.0], save_s=4.0).ok
