import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import open_directory
from verl_slurm.checkpoint.decide.retention import plan_prune
from verl_slurm.checkpoint.decide.storage import need_of_next
from verl_slurm.checkpoint.store import pruning
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.commit import sweep
from verl_slurm.checkpoint.store.pruning import apply_prune
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.checkpoint.store.verify import verify

Save = Callable[..., Path]


def names(paths: RunPaths) -> list[str]:
    return sorted(p.name for p in paths.checkpoints.iterdir() if p.name.startswith("step"))


def test_nothing_is_removed_while_no_kept_one_verifies(save: Save, paths: RunPaths) -> None:
    for step in (1, 2):
        save(step)
    (paths.checkpoint(2) / "config.yaml").write_bytes(b"")
    assert apply_prune(paths, plan_prune(list_checkpoints(paths), 1)) == []
    assert choose_resume(paths, "auto").name == "step_000001"


def test_killed_at_any_point_the_newest_verified_one_is_still_there(
    save: Save, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(step)
    plan = plan_prune(list_checkpoints(paths), 1)
    nth, code = 0, 9
    while code != 0:
        nth += 1
        pid = os.fork()
        if pid == 0:
            count = [0]

            def wrap(
                real: Callable[..., object], count: list[int] = count, nth: int = nth
            ) -> Callable[..., object]:
                def call(*args: object, **kwargs: object) -> object:
                    count[0] += 1
                    if count[0] == nth:
                        os._exit(9)
                    return real(*args, **kwargs)

                return call

            try:
                for name in ("rename", "unlink", "rmdir", "fsync"):
                    monkeypatch.setattr(os, name, wrap(getattr(os, name)))
                apply_prune(paths, plan)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in {0, 9}
        assert choose_resume(paths, "auto", move_damaged=False).name == "step_000003"
        for info in list_checkpoints(paths):
            assert info.kind == "torn" or verify(info.path).ok
    sweep(paths)
    assert names(paths) == ["step_000003"]
    assert nth > 2


def test_a_save_before_the_end_does_not_wait_for_the_files_of_an_old_checkpoint(
    save: Save, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found with the files of 10,000 ranks: their removal took longer than the grace time."""
    for step in (1, 2, 3):
        save(step)
    may_remove = threading.Event()
    removed: list[str] = []

    def slow(name: str, *, dir_fd: int) -> None:
        assert may_remove.wait(30)
        shutil.rmtree(paths.checkpoints / name)
        removed.append(name)

    monkeypatch.setattr(pruning, "shutil", SimpleNamespace(rmtree=slow))
    removing = pruning.Removing()
    plan = plan_prune(list_checkpoints(paths), 1)
    assert apply_prune(paths, plan, remove=removing.remove) == ["step_000001", "step_000002"]
    assert names(paths) == ["step_000003"], "none of them is a checkpoint any more"
    removing.leave_room(paths.checkpoints, need_of_next(1, 1))
    assert removed == []
    assert len(list(paths.checkpoints.glob(".step_*.tmp"))) == 2, (
        "as a staging directory, which a start sweeps"
    )
    may_remove.set()
    removing.close()
    assert len(removed) == 2
    assert not list(paths.checkpoints.glob(".step_*.tmp"))


def test_a_save_that_has_no_room_beside_them_waits_for_the_files_of_an_old_checkpoint(
    save: Save, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def after_the_question(name: str, *, dir_fd: int) -> None:
        assert asked.wait(30)
        shutil.rmtree(paths.checkpoints / name)

    def no_room(*_: object) -> SimpleNamespace:
        asked.set()
        return SimpleNamespace(enough=False)

    monkeypatch.setattr(pruning, "shutil", SimpleNamespace(rmtree=after_the_question))
    monkeypatch.setattr(pruning, "room_for", no_room)
    removing = pruning.Removing()
    for step in (1, 2):
        save(step)
    apply_prune(paths, plan_prune(list_checkpoints(paths), 1), remove=removing.remove)
    removing.leave_room(paths.checkpoints, need_of_next(1, 1))
    assert not list(paths.checkpoints.glob(".step_*.tmp"))
    removing.close()


def test_what_could_not_be_removed_later_is_said_at_the_next_removal(
    save: Save, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fails(name: str, *, dir_fd: int) -> None:
        failed.set()
        raise PermissionError(13, "not yours", name)

    monkeypatch.setattr(pruning, "shutil", SimpleNamespace(rmtree=fails))
    removing = pruning.Removing()
    for step in (1, 2):
        save(step)
    apply_prune(paths, plan_prune(list_checkpoints(paths), 1), remove=removing.remove)
    assert failed.wait(30)
    removing.close()
    with open_directory(paths.checkpoints) as folder, pytest.raises(PermissionError, match="not yours"):
        removing.remove(folder, "any")
