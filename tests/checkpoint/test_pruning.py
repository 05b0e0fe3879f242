"""Pruning by hand: what is printed is what is done, and the last good checkpoint outlives it, whatever is damaged."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from verl_slurm.base.errors import CheckpointCorrupt, NotFound
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import Problem, Verdict
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.pruning import apply_prune, carry_out, look
from verl_slurm.checkpoint.store.quarantine import move_to_quarantine

Save = Callable[..., Path]


def damage(checkpoint: Path) -> None:
    path = checkpoint / "actor" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def names(paths: RunPaths, kind: str = "committed") -> list[str]:
    return [info.name for info in list_checkpoints(paths) if info.kind == kind]


def tree(paths: RunPaths) -> list[str]:
    return sorted(str(path) for path in paths.checkpoints.rglob("*"))


def test_to_look_changes_nothing_and_the_plan_is_carried_out_as_it_was_seen(
    paths: RunPaths, save: Save
) -> None:
    for step in (10, 20, 30, 40, 50):
        save(step)
    before = tree(paths)
    found = look(paths, 1, keep_every=20)
    assert tree(paths) == before
    assert [item.name for item in found.plan.keep] == ["step_000050", "step_000040", "step_000020"]
    assert carry_out(paths, found) == ["step_000010", "step_000030"]
    assert names(paths) == ["step_000050", "step_000040", "step_000020"]
    assert carry_out(paths, look(paths, 1, keep_every=20)) == []


def test_a_damaged_newest_is_kept_and_does_not_count_as_the_good_one(paths: RunPaths, save: Save) -> None:
    for step in (1, 2, 3):
        save(step)
    damage(paths.checkpoint(3))
    found = look(paths, 1)
    assert found.good == "step_000002"
    assert len(found.bad) == 1
    assert found.bad[0].startswith("step_000003: actor/")
    assert carry_out(paths, found) == ["step_000001"]
    assert names(paths) == ["step_000003", "step_000002"]


def test_where_nothing_verifies_nothing_goes(paths: RunPaths, save: Save) -> None:
    with pytest.raises(NotFound, match="has no checkpoint:"):
        look(paths, 1)
    for step in (1, 2):
        damage(save(step))
    aside = move_to_quarantine(save(3), ["looked odd"])
    with pytest.raises(CheckpointCorrupt, match="none is removed"):
        look(paths, 1, quarantine_too=True)
    assert names(paths) == ["step_000002", "step_000001"]
    assert aside is not None
    assert aside.exists()


def test_what_was_set_aside_goes_only_when_asked_for_and_its_reason_with_it(
    paths: RunPaths, save: Save
) -> None:
    save(2)
    aside = move_to_quarantine(save(1), ["looked odd"])
    assert aside is not None
    assert carry_out(paths, look(paths, 1)) == []
    assert aside.exists()
    found = look(paths, 1, quarantine_too=True)
    assert found.sizes[aside.name] > 0
    assert carry_out(paths, found) == [aside.name]
    assert list(paths.quarantine.iterdir()) == []


def test_what_is_torn_or_not_ours_is_never_touched(paths: RunPaths, save: Save) -> None:
    for step in (1, 2, 3):
        save(step)
    (paths.checkpoints / "notes.txt").write_text("mine")
    (paths.checkpoint(3) / "manifest.json").write_bytes(b"{")
    save(4)
    found = look(paths, 1)
    shutil.rmtree(paths.checkpoint(1))
    assert carry_out(paths, found) == ["step_000002"], "what the run has removed meanwhile is passed over"
    assert names(paths) == ["step_000004"]
    assert (paths.checkpoints / "notes.txt").exists()
    assert paths.checkpoint(3).exists()


class Disk:
    """Checkpoints as bare manifests of which some are good, by decree: thousands of cases a second."""

    def __init__(self, paths: RunPaths, good: dict[str, bool]) -> None:
        self.paths, self.good = paths, good
        self.read: list[str] = []

    def verify(self, path: Path) -> Verdict:
        self.read.append(path.name)
        ok = self.good[path.name]
        problems = () if ok else (Problem(path=".", what="by decree"),)
        return Verdict(name=path.name, ok=ok, problems=problems, manifest=None, num_bytes=0, seconds=0.0)


def test_of_every_pattern_of_damage_the_last_good_one_survives_every_prune(
    paths: RunPaths, save: Save, tmp_path: Path
) -> None:
    """All 2^5 patterns of what is damaged, with each of several retentions, on real directories."""
    for step in (10, 20, 30, 40, 50):
        save(step)
    whole = tmp_path / "whole"
    paths.checkpoints.rename(whole)
    for pattern in itertools.product([True, False], repeat=5):
        good = {f"step_{step:06d}": ok for step, ok in zip(range(10, 60, 10), pattern, strict=True)}
        last_good = max((name for name, ok in good.items() if ok), default=None)
        for keep_last, keep_every in ((1, 0), (1, 20)):
            for name in good:
                (paths.checkpoints / name).mkdir(parents=True)
                shutil.copy(whole / name / "manifest.json", paths.checkpoints / name)
            disk = Disk(paths, good)
            try:
                carry_out(paths, look(paths, keep_last, keep_every=keep_every, verifier=disk.verify))
            except CheckpointCorrupt:
                assert last_good is None
            left = set(names(paths))
            if last_good is None:
                assert left == set(good)
            else:
                assert last_good in left
                assert max(good) in left
                assert disk.read == [name for name in sorted(good, reverse=True) if name >= last_good]
            shutil.rmtree(paths.checkpoints)


def test_a_plan_that_names_no_checkpoint_is_refused_before_anything_is_removed(
    paths: RunPaths, save: Save
) -> None:
    for step in (1, 2):
        save(step)
    plan = look(paths, 1).plan
    evil = replace(plan.drop[0], name="../other")
    with pytest.raises(ValueError, match="no checkpoint's name"):
        apply_prune(paths, replace(plan, drop=(*plan.drop, evil)))
    assert names(paths) == ["step_000002", "step_000001"]
