"""Saving some domains of a living model: apart from the full checkpoints, whole in itself, and of the same bits."""

from pathlib import Path

import pytest
import torch

from tests.save.parts import ALONE, Parts, contents, provenance
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.save.ranks.loader import read_whole
from verl_slurm.save.ranks.saver import CheckpointSaver

pytestmark = pytest.mark.torch


def test_a_partial_save_holds_the_same_bits_of_what_it_holds_and_the_full_one_beside_it_is_whole(
    tmp_path: Path,
) -> None:
    paths, parts = RunPaths(tmp_path), Parts(updates=2)
    saver = CheckpointSaver(paths, parts.tensors(), provenance(), ALONE, attempt_check=lambda: None)
    try:
        some = saver.begin(contents(), components=("actor",)).result()
        saver.fence()
        full = saver.begin(contents()).result()
    finally:
        saver.close()
    partial = paths.partial.checkpoints / some.name
    assert sorted(path.name for path in partial.iterdir() if path.is_dir()) == ["actor"]
    for directory, components in ((partial, ("actor",)), (paths.checkpoints / full.name, ())):
        verdict = verify(directory)
        assert verdict.ok, verdict.problems
        assert verdict.manifest is not None
        assert verdict.manifest.components == components
    assert some.num_bytes < full.num_bytes
    assert (paths.root / "partial").stat().st_mode & 0o077 == 0
    there = read_whole(partial, "actor")
    for name, tensor in parts.tensors()["actor"].items():
        assert torch.equal(there[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    assert choose_resume(paths, "auto").path == paths.checkpoints / full.name


def test_with_its_optimizer_a_partial_save_holds_that_domain_too(tmp_path: Path) -> None:
    paths, parts = RunPaths(tmp_path), Parts(updates=2)
    saver = CheckpointSaver(paths, parts.tensors(), provenance(), ALONE, attempt_check=lambda: None)
    try:
        done = saver.begin(contents(), components=("actor", "optimizer")).result()
    finally:
        saver.close()
    there = read_whole(paths.partial.checkpoints / done.name, "optimizer")
    assert there.keys() == parts.tensors()["optimizer"].keys()
    assert choose_resume(paths, "auto").name is None
