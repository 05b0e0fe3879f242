"""A small but whole checkpoint, made through the real commit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import make_manifest, own_run
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, Manifest
from verl_slurm.checkpoint.format.state_schema import current_schema, render_schema
from verl_slurm.checkpoint.store.commit import StagingDirectory, begin, commit, seal

FILES = {
    "config.yaml": b"name: run\n",
    "metadata.json": b"{}",
    "orchestration.json": b"{}",
    "scheduler.json": b"{}",
    SCHEMA_VERSION: render_schema(current_schema()),
    "actor/.metadata": b"meta",
    "actor/__0_0.distcp": b"actor weights" * 100,
    "critic/__0_0.distcp": b"critic weights" * 100,
    "optimizer/__0_0.distcp": b"moments" * 100,
    "runtime_state.rank_0000.msgpack.zst": b"state 0",
    "runtime_state.rank_0001.msgpack.zst": b"state 1",
}


def strew(checkpoint: Path) -> None:
    """Leaves in a checkpoint what users, tools and people of bad intent do: none of it is in the manifest."""
    (checkpoint / ".DS_Store").write_bytes(b"folders")
    (checkpoint / ".DS_Store").chmod(0o666)
    cache = checkpoint / "actor" / "__pycache__"
    cache.mkdir()
    (cache / "reward.pyc").write_bytes(b"code")
    (cache / "self").symlink_to("..")
    (checkpoint / "away").symlink_to("/etc")
    os.mkfifo(checkpoint / "critic" / "new\nline")


STREWN = {".DS_Store", "actor/__pycache__/reward.pyc", "actor/__pycache__/self", "away", "critic/new\nline"}
"""What is no directory of that."""


def leaves(directory: Path) -> set[str]:
    """Names below a directory that are no directories."""
    found = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {path.relative_to(directory).as_posix() for path in found}


def owns_it() -> None:
    """An attempt check that finds nothing wrong."""


def stage(
    paths: RunPaths, step: int, safe_point: int = 0, files: dict[str, bytes] = FILES
) -> StagingDirectory:
    staging = begin(paths, step, safe_point)
    for name, data in files.items():
        path = staging.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return staging


def manifest_of(staging: StagingDirectory, **changes: object) -> Manifest:
    files = sorted(
        p.relative_to(staging.directory).as_posix() for p in staging.directory.rglob("*") if p.is_file()
    )
    fields: dict[str, Any] = {"name": staging.final.name, "safe_point": staging.safe_point, "world_size": 2}
    fields |= {"phase": "update" if staging.safe_point else "step_end"}
    fields |= {"step": staging.step, "files": tuple(seal(staging.directory, files))}
    return make_manifest(**(fields | own_run(staging.final) | changes))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(private_dir(tmp_path / "run"))


@pytest.fixture
def save(paths: RunPaths) -> Callable[..., Path]:
    """`save(step, safe_point=0, **manifest_changes)` → the committed directory."""

    def make(step: int, safe_point: int = 0, files: dict[str, bytes] = FILES, **changes: object) -> Path:
        staging = stage(paths, step, safe_point, files)
        return commit(staging, manifest_of(staging, **changes), attempt_check=owns_it)

    return make


@pytest.fixture
def staged(paths: RunPaths) -> Callable[..., tuple[StagingDirectory, Manifest]]:
    """`staged(step)` → a sealed staging directory and its manifest, not committed."""

    def make(step: int, safe_point: int = 0, **changes: object) -> tuple[StagingDirectory, Manifest]:
        staging = stage(paths, step, safe_point)
        return staging, manifest_of(staging, **changes)

    return make
