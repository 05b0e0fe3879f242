import re

import msgspec
import pytest

from tests.builders import make_manifest
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.format import specification as specification
from verl_slurm.checkpoint.format.specification import (
    REQUIRED_DIRECTORIES,
    REQUIRED_FILES,
    STAGING_NAME,
    FileEntry,
    Manifest,
    missing_parts,
    path_problem,
)


def manifest(*paths: str, world_size: int = 1) -> Manifest:
    return make_manifest(
        world_size=world_size, files=tuple(FileEntry(path=p, size=0, sha256="0" * 64) for p in paths)
    )


def test_the_specification_names_every_part_the_code_requires() -> None:
    text = specification.__doc__ or ""
    tree = text.split("```")[1]
    for name in REQUIRED_FILES:
        assert name in tree
    for name in REQUIRED_DIRECTORIES:
        assert f"{name}/" in tree
    for name in re.findall(r"MAX_\w+", text):
        assert hasattr(specification, name)
    for name in re.findall(r"^  (step_\S+)/", tree, re.MULTILINE):
        assert CHECKPOINT_NAME.fullmatch(name)


def test_a_staging_name_is_never_a_checkpoints_name_and_the_other_way_round() -> None:
    paths = RunPaths("run")
    for final in (paths.checkpoint(1), paths.checkpoint(12, 7)):
        name = paths.staging(final, "0123456789abcdef").name
        assert STAGING_NAME.fullmatch(name)
        assert not CHECKPOINT_NAME.fullmatch(name)
        assert not STAGING_NAME.fullmatch(final.name)


@pytest.mark.parametrize("path", ["config.yaml", "actor/.metadata", "actor/__0_0.distcp", "a/b/c/d/e/f/g/h"])
def test_plain_paths_are_fine(path: str) -> None:
    assert path_problem(path) is None


@pytest.mark.parametrize(
    "path", ["..", "a/..", "/a", "a/", "a//b", "a b", "é", "a\n", "manifest.json", "a/" * 8 + "b"]
)
def test_other_paths_are_refused_with_a_reason(path: str) -> None:
    assert path_problem(path)


def test_missing_parts_are_named_for_every_rank() -> None:
    parts = missing_parts(manifest("actor/x", "runtime_state.rank_0000.msgpack.zst", world_size=2))
    assert set(parts) == {*REQUIRED_FILES, "runtime_state.rank_0001.msgpack.zst", "critic/", "optimizer/"}


def test_a_checkpoint_of_a_run_without_a_critic_needs_none() -> None:
    grpo = msgspec.structs.replace(manifest("actor/x", "optimizer/x"), trained=("actor",))
    assert not any(part.endswith("/") for part in missing_parts(grpo))
    assert "critic/" in missing_parts(manifest("actor/x", "optimizer/x"))
    partial = msgspec.structs.replace(grpo, components=("optimizer",), files=grpo.files[:1])
    assert "optimizer/" in missing_parts(partial)
