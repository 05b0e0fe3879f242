"""Which checkpoint is read back next, and what becomes of one that rotted."""

from pathlib import Path
from typing import Any

import pytest

from verl_slurm.base.tree import open_directory
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES
from verl_slurm.checkpoint.store import chunks
from verl_slurm.checkpoint.store.chunks import Reading, entry_of, read_checked
from verl_slurm.checkpoint.store.scrub import next_due


def _info(step: int, kind: Any = "committed") -> CheckpointInfo:
    name = f"step_{step:06d}"
    return CheckpointInfo(kind=kind, name=name, path=Path(name), step=step, safe_point=0)


def test_the_newest_that_was_never_read_comes_first_then_the_one_whose_last_look_is_oldest() -> None:
    due = next_due([_info(1), _info(3), _info(2)], {"step_000003": 50.0}, now=100.0, every_s=60.0)
    assert (due.name, due.in_s) == ("step_000002", 0.0)
    read_at = {"step_000001": 90.0, "step_000002": 40.0}
    due = next_due([_info(1), _info(2)], read_at, now=80.0, every_s=60.0)
    assert (due.name, due.in_s) == ("step_000002", 20.0)
    assert next_due([_info(1), _info(2)], read_at, now=200.0, every_s=60.0).in_s == 0.0
    assert next_due([_info(1, "quarantined")], {}, now=0.0, every_s=60.0).name is None
    for kind in ("torn", "foreign"):
        assert next_due([_info(1, kind)], {}, now=0.0, every_s=60.0).name == "step_000001"


def test_a_speed_limit_is_kept_by_pausing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(3 * CHUNK_BYTES)
    (tmp_path / "f").write_bytes(data)
    now, pauses = [100.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(chunks.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(chunks.time, "sleep", sleep)
    with open_directory(tmp_path) as root:
        readings = [Reading(entry_of("f", data))]
        read_checked(root, readings, threads=4, on_problem=lambda *_: None, bytes_per_s=CHUNK_BYTES / 2)
    assert pauses == [2.0, 2.0, 2.0]
