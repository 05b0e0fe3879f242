"""Saving, loading and comparing in one process, unsharded; the sharded way is tests/trainer/test_loop.py."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.save.parts import (
    ALONE,
    Net,
    Parts,
    checkpoint_saver,
    contents,
    load_runtime_state,
    load_tensors,
    runtime,
)
from verl_slurm.base.errors import CheckpointCorrupt, Fenced
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.checkpoint.store import commit
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.runtime_state.format import RuntimeState
from verl_slurm.save.ranks import medium_results, saver
from verl_slurm.save.ranks.collective import RanksFailed
from verl_slurm.save.ranks.saver import SavedCheckpoint
from verl_slurm.save.ranks.tensors import model_tensors, optimizer_tensors

pytestmark = pytest.mark.torch


def _save(
    root: Path, parts: Parts, state: RuntimeState | None = None, fence: Callable[[], None] = lambda: None
) -> SavedCheckpoint:
    checkpoints = checkpoint_saver(root, parts, fence=fence)
    try:
        return checkpoints.begin(contents(state=state)).result()
    finally:
        checkpoints.close()


def _directory(root: Path) -> Path:
    return RunPaths(root).checkpoints / "step_000002"


def test_what_was_saved_verifies_and_loads_bit_for_bit(tmp_path: Path) -> None:
    old = Parts(updates=3)
    done = _save(tmp_path, old)
    verdict = verify(_directory(tmp_path))
    assert verdict.ok, verdict.problems
    assert (done.name, done.num_bytes) == ("step_000002", verdict.manifest.num_bytes)

    new = Parts(seed=9)
    load_tensors(_directory(tmp_path), new.tensors(), ALONE)
    for domain, tensors in old.tensors().items():
        for name, tensor in tensors.items():
            assert torch.equal(
                tensor.view(-1).view(torch.uint8), new.tensors()[domain][name].view(-1).view(torch.uint8)
            )
    assert new.model.tied.weight is new.model.inner.weight
    assert load_runtime_state(_directory(tmp_path), 0, 1).kl_window == [0.5]


def test_a_loaded_optimizer_goes_on_as_the_saved_one(tmp_path: Path) -> None:
    old, new = Parts(updates=3), Parts(seed=9)
    _save(tmp_path, old)
    load_tensors(_directory(tmp_path), new.tensors(), ALONE)
    for parts in (old, new):
        parts.model(torch.ones(1, 3)).sum().backward()
        parts.optimizer.step()
    assert torch.equal(old.model.inner.weight, new.model.inner.weight)


def test_state_that_is_made_early_is_what_adamw_would_have_made() -> None:
    early, late = Parts(updates=3), Parts(updates=3, initialise=False)
    assert torch.equal(early.model.inner.weight, late.model.inner.weight)
    mine, theirs = (optimizer_tensors({"a": (p.model, p.optimizer)}) for p in (early, late))
    assert mine.keys() == theirs.keys()
    assert all(
        torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine
    )


def test_a_tied_weight_is_saved_once(tmp_path: Path) -> None:
    assert set(model_tensors(Net())) == {"inner.weight", "inner.bias", "frozen", "scale"}


def test_equal_checkpoints_compare_as_the_same_even_with_nan(tmp_path: Path) -> None:
    for side in ("a", "b"):
        _save(tmp_path / side, Parts(updates=2))
    result = compare(_directory(tmp_path / "a"), _directory(tmp_path / "b"))
    assert result.same, result.differing
    assert result.num_tensors == 4 + 1 + 2 * 3


def test_one_changed_bit_is_found_and_named(tmp_path: Path) -> None:
    changed = Parts(updates=2)
    with torch.no_grad():
        changed.model.scale[0] = float(np.nextafter(np.float32(1.5), np.float32(2)))
    changed.optimizer.state[changed.model.inner.bias]["exp_avg"][1] *= -1.0
    _save(tmp_path / "a", Parts(updates=2))
    _save(tmp_path / "b", changed, runtime(rng={"torch": bytes(range(1, 5)), "python": b"abc"}))
    result = compare(_directory(tmp_path / "a"), _directory(tmp_path / "b"))
    assert result.differing == (
        "actor/scale",
        "optimizer/actor.inner.bias.exp_avg",
        "runtime_state.rank_0000.msgpack.zst/rng/torch",
    )


def test_a_damaged_checkpoint_is_not_compared(tmp_path: Path) -> None:
    _save(tmp_path, Parts())
    index = _directory(tmp_path) / "actor" / "index.json"
    index.write_bytes(index.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointCorrupt):
        compare(_directory(tmp_path), _directory(tmp_path))


def test_a_shard_that_cannot_be_written_fails_the_save_with_its_reason(tmp_path: Path) -> None:
    def occupy(*args: Any, **more: Any) -> Any:
        staging = begin(*args, **more)
        (staging.directory / "actor").mkdir()
        (staging.directory / "actor" / "rank_0000.bin").write_text("in the way")
        return staging

    begin = commit.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "begin", occupy)
        with pytest.raises(
            RanksFailed, match=r"writing the checkpoint failed.*rank 0: .*File exists: .*rank_0000"
        ):
            _save(tmp_path, Parts())
    assert list(RunPaths(tmp_path).checkpoints.iterdir()) == []


def test_a_shard_that_cannot_be_read_fails_the_load_with_its_reason(tmp_path: Path) -> None:
    _save(tmp_path, Parts())
    (_directory(tmp_path) / "actor" / "rank_0000.bin").unlink()
    with pytest.raises(RanksFailed, match=r"reading tensors failed.*rank 0: FileNotFoundError"):
        load_tensors(_directory(tmp_path), Parts().tensors(), ALONE)


def test_a_shard_that_changed_since_it_was_verified_is_not_loaded(tmp_path: Path) -> None:
    _save(tmp_path, Parts())
    shard = _directory(tmp_path) / "actor" / "rank_0000.bin"
    data = bytearray(shard.read_bytes())
    data[3] ^= 1
    shard.write_bytes(data)
    parts = Parts(seed=9)
    before = parts.model.inner.weight.detach().clone()
    with pytest.raises(RanksFailed, match=r"rank 0: CheckpointCorrupt: .*actor/rank_0000.bin.*sha256"):
        load_tensors(_directory(tmp_path), parts.tensors(), ALONE)
    assert torch.equal(parts.model.inner.weight, before)


@pytest.mark.parametrize(
    "stage",
    ["commit.begin", "saver.encode", "saver.seal_small", "medium_results.write_small", "commit.commit"],
)
def test_a_save_that_fails_leaves_nothing_behind(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    module, _, name = stage.partition(".")
    monkeypatch.setattr(
        {"commit": commit, "saver": saver, "medium_results": medium_results}[module], name, fail
    )
    with pytest.raises(RanksFailed, match="No space left"):
        _save(tmp_path, Parts())
    assert not RunPaths(tmp_path).checkpoints.exists() or list(RunPaths(tmp_path).checkpoints.iterdir()) == []
    monkeypatch.undo()
    _save(tmp_path, Parts())
    assert verify(_directory(tmp_path)).ok


def test_a_fenced_attempt_commits_nothing_and_says_why(tmp_path: Path) -> None:
    def fence() -> None:
        raise Fenced("attempt 2 owns the run")

    with pytest.raises(RanksFailed) as caught:
        _save(tmp_path, Parts(), fence=fence)
    assert caught.value.kinds == {"Fenced"}
    assert list(RunPaths(tmp_path).checkpoints.iterdir()) == []


def test_another_model_is_refused_with_the_tensor_named(tmp_path: Path) -> None:
    _save(tmp_path, Parts())
    for change, word in (
        (lambda t: t["actor"].pop("scale"), "1 left over: scale"),
        (lambda t: t["actor"].update(more=torch.zeros(1)), "1 missing: more"),
        (lambda t: t["actor"].update(scale=torch.zeros(3)), "scale"),
        (lambda t: t["actor"].update(scale=torch.zeros(2, dtype=torch.float64)), "scale"),
    ):
        tensors = Parts().tensors()
        change(tensors)
        with pytest.raises(CheckpointCorrupt, match=word):
            load_tensors(_directory(tmp_path), tensors, ALONE)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOENT])
def test_storage_that_does_not_answer_says_nothing_about_the_checkpoint(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, Parts())

    def fail(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("verl_slurm.checkpoint.store.chunks.open_below", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        load_runtime_state(_directory(tmp_path), 0, 1)


def test_a_runtime_state_of_another_rank_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, Parts())
    with pytest.raises(CheckpointCorrupt, match="rank 0 of 1"):
        load_runtime_state(_directory(tmp_path), 0, 2)
