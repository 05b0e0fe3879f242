import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.recover import set_aside

Save = Callable[..., Path]


def test_entries_are_classed_and_the_newest_comes_first(
    save: Save, staged: Callable[..., object], paths: RunPaths
) -> None:
    assert list_checkpoints(paths) == [], "no directory"
    for step, safe_point in ((2, 0), (10, 0), (2, 11), (3, 0), (4, 0)):
        save(step, safe_point)
    (paths.checkpoint(3) / "manifest.json").write_bytes(b"{}")
    set_aside(paths, "step_000004", "a test")
    staged(11)
    (paths.checkpoints / "step_000005").write_bytes(b"a file")
    (paths.checkpoints / "step_000006").symlink_to(paths.checkpoint(2))
    (paths.checkpoints / "step-7.tmp").mkdir()
    found = [(i.kind, i.step, i.safe_point) for i in list_checkpoints(paths)]
    assert found == [
        ("committed", 10, 0),
        ("committed", 2, 11),
        ("committed", 2, 0),
        ("torn", 11, 0),
        ("torn", 3, 0),
        ("quarantined", 4, 0),
        ("foreign", 6, 0),
        ("foreign", 5, 0),
        ("foreign", -1, -1),
    ]
    details = [info.detail for info in list_checkpoints(paths) if info.kind == "foreign"]
    assert f"found a link to {paths.checkpoint(2)}" in details[0]
    assert "move the real one here" in details[0]
    assert "found something else" in details[1]
    assert details[2] == "not a checkpoint's name"
    newest = list_checkpoints(paths)[0]
    assert (newest.attempt, newest.world_size, newest.phase) == (1, 2, "step_end")
    assert newest.num_bytes > 0


@pytest.mark.parametrize("moment", ["before it is looked at", "before it is opened"])
def test_what_a_living_run_removes_meanwhile_is_not_there(
    save: Save, paths: RunPaths, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = save(2), save(4)

    def looked_at(path: Path) -> os.stat_result:
        if path == old and moment.startswith("before it is looked"):
            shutil.rmtree(old, ignore_errors=True)
        info = os.lstat(path)
        if path == old:
            shutil.rmtree(old)
        return info

    monkeypatch.setattr(Path, "lstat", looked_at)
    assert [info.name for info in list_checkpoints(paths)] == [new.name]


def test_storage_that_does_not_answer_is_not_taken_for_a_checkpoint_that_is_gone(
    save: Save, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(2)

    def stale(*_: object, **__: object) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("verl_slurm.checkpoint.store.catalog.read_manifest", stale)
    monkeypatch.setattr(os, "lstat", stale)
    (found,) = list_checkpoints(paths)
    assert (found.kind, "Stale file handle" in found.detail) == ("torn", True)
    assert set_aside(paths, path.name, "a test") is not None
