"""Saves to two media: each with its own fate, and the way home."""

import errno
import os
from pathlib import Path

import pytest

from tests.builders import write_manifest
from tests.save.parts import Parts, checkpoint_saver, contents, load_tensors
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store import commit
from verl_slurm.checkpoint.store.local_copy import (
    LocalPart,
    assemble,
    list_parts,
    local_directory,
    prune_parts,
    send_home,
)
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.save.ranks import saver as saver_module, second_copy
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.save.ranks.pending_save import why_not_shared
from verl_slurm.save.ranks.saver import LocalPlace, SavedCheckpoint

pytestmark = pytest.mark.torch


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir()
    return RunPaths(private_dir(tmp_path / "run"))


@pytest.fixture
def local(tmp_path: Path, run: RunPaths) -> Path:
    found = local_directory(str(tmp_path / "nvme"), run, "n1")
    assert found is not None
    return found


def _save(
    run: RunPaths, local: Path, parts: Parts, step: int = 2, seconds_left: float | None = None
) -> SavedCheckpoint:
    place = LocalPlace(directory=local, is_first=True, keep=2)
    saver = checkpoint_saver(run.root, parts, local=place)
    try:
        return saver.begin(contents(step)).result()
    finally:
        saver.close()


def _lose_shared_storage(run: RunPaths) -> None:
    if run.checkpoints.is_dir():
        run.checkpoints.rename(run.root / "away")
    run.checkpoints.write_bytes(b"")


def _bring_back_shared_storage(run: RunPaths) -> None:
    run.checkpoints.unlink()
    if (run.root / "away").is_dir():
        (run.root / "away").rename(run.checkpoints)


def _bring_home(run: RunPaths, *directories: Path) -> list[bool]:
    for directory in directories:
        for part in list_parts(directory):
            send_home(part, run)
    return [good for _, good, _ in assemble(run)]


def _leftovers(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.endswith(".tmp")]


def test_with_shared_storage_gone_the_local_copy_is_a_save_and_comes_home(run: RunPaths, local: Path) -> None:
    old = Parts(updates=2)
    _lose_shared_storage(run)
    done = _save(run, local, old)
    assert not done.on_shared
    assert "shared storage" in done.problem
    assert run.checkpoints.is_file()
    _bring_back_shared_storage(run)

    assert _bring_home(run, local) == [True]
    assert verify(run.checkpoints / done.name).ok
    new = Parts(seed=9)
    load_tensors(run.checkpoints / done.name, new.tensors(), Collective(None))
    assert new.digest() == old.digest()


def test_with_the_local_disk_gone_shared_storage_has_it_and_it_is_said(run: RunPaths, tmp_path: Path) -> None:
    (tmp_path / "nvme").write_bytes(b"")
    done = _save(run, tmp_path / "nvme" / "n1", Parts())
    assert done.on_shared
    assert "not on the nodes' disks" in done.problem
    assert verify(run.checkpoints / done.name).ok


def test_with_both_gone_the_save_fails_and_nothing_half_made_stays(run: RunPaths, tmp_path: Path) -> None:
    (tmp_path / "nvme").write_bytes(b"")
    _lose_shared_storage(run)
    with pytest.raises(RanksFailed):
        _save(run, tmp_path / "nvme" / "n1", Parts())
    assert sorted(os.listdir(tmp_path)) == ["nvme", "run"]


def test_a_commit_that_shared_storage_refuses_leaves_the_local_copy(
    run: RunPaths, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Path:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(saver_module.door, "commit", refuse)
    done = _save(run, local, Parts())
    assert (done.on_shared, "quota" in done.problem) == (False, True)
    assert os.listdir(run.checkpoints) == []


def test_a_copy_on_the_local_disk_alone_is_read_back(
    run: RunPaths, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rotten(part: LocalPart) -> list[str]:
        return ["actor/rank_0000.bin: sha256 wrong"]

    monkeypatch.setattr(second_copy.local_copy, "part_problems", rotten)
    _lose_shared_storage(run)
    with pytest.raises(RanksFailed, match="failed"):
        _save(run, local, Parts())
    assert list_parts(local) == []


@pytest.mark.parametrize("usual_seconds", [None, 30.0])
def test_where_time_is_short_shared_storage_is_not_even_tried(
    run: RunPaths, local: Path, usual_seconds: float | None
) -> None:
    place = LocalPlace(directory=local, is_first=True, keep=2)
    saver = checkpoint_saver(run.root, Parts(), local=place, usual_seconds=usual_seconds)
    try:
        # Its speed is not known yet, or by a former process.
        assert saver.begin(contents(1), seconds_left=20.0).result().on_shared is (usual_seconds is None)
        assert saver.begin(contents(1), seconds_left=3600.0).result().on_shared
        hurried = saver.begin(contents(2), seconds_left=0.0).result()
        assert not hurried.on_shared
        assert "s are left" in hurried.problem
        assert saver.begin(contents(3), seconds_left=3600.0).result().on_shared
    finally:
        saver.close()


@pytest.mark.parametrize(
    ("last", "left", "has_local", "tried"),
    [
        (10.0, 14.0, True, False),
        (10.0, 15.0, True, True),
        (10.0, 1.0, False, True),
        (None, 1.0, True, True),
        (10.0, None, True, True),
    ],
)
def test_the_decision_about_shared_storage(
    last: float | None, left: float | None, has_local: bool, tried: bool
) -> None:
    assert (why_not_shared(last, left, has_local=has_local) == "") is tried


def test_a_save_under_way_is_left_alone_by_what_comes_home(run: RunPaths, local: Path) -> None:
    _save(run, local, Parts())
    staging = commit.begin(run, 7, 0)
    (staging.directory / "half").write_bytes(b"x")
    assert _bring_home(run, local) == [False]  # its name is taken by the one that is there
    assert (staging.directory / "half").exists()


def test_old_parts_go_and_the_newest_stay(run: RunPaths, local: Path) -> None:
    for step in (1, 2, 3, 3):
        _save(run, local, Parts(), step)
    assert [part.name for part in list_parts(local)] == ["step_000003", "step_000002"]
    (local / ".step_000004.0123456789abcdef.tmp").mkdir()
    (local / "mine.txt").write_bytes(b"not ours")
    assert prune_parts(local, 1) == [".step_000004.0123456789abcdef.tmp", "step_000002"]
    assert sorted(os.listdir(local)) == ["mine.txt", "step_000003"]


def test_parts_of_a_run_that_was_here_before_crowd_out_none_of_ours(run: RunPaths, local: Path) -> None:
    _save(run, local, Parts(), 1)
    former = private_dir(local / "step_000009")
    write_manifest(former, 9, run_id="fedcba9876543210", attempt=7)
    assert prune_parts(local, 1) == []
    assert former.exists()


def test_every_run_and_node_has_a_place_of_its_own(run: RunPaths, tmp_path: Path) -> None:
    places = {
        local_directory("/nvme", paths, node)
        for paths in (run, RunPaths(private_dir(tmp_path / "elsewhere" / "run")))
        for node in ("n1", "n2")
    }
    assert len(places) == 4
    assert local_directory(None, run, "n1") is None


def test_what_a_later_attempt_saved_outlives_higher_steps_of_a_former_one(run: RunPaths, local: Path) -> None:
    """The run went back: its new part of a lower step is the one that counts (review)."""
    for step in (100, 110):
        _save(run, local, Parts(), step)
    saver = checkpoint_saver(
        run.root, Parts(), local=LocalPlace(directory=local, is_first=True, keep=1), attempt=2
    )
    try:
        saver.begin(contents(60)).result()
    finally:
        saver.close()
    assert [part.name for part in list_parts(local)] == ["step_000060"]
