"""A run with checkpoints made through the real commit, and storages to move them to."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.endpoint
import botocore.session
import pytest

from tests.builders import write_manifest
from tests.checkpoint.conftest import FILES, manifest_of, owns_it, stage
from tests.fakes.s3_server import BUCKET, StandIn
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.checkpoint.store.chunks import entry_of
from verl_slurm.checkpoint.store.commit import commit
from verl_slurm.checkpoint.store.copies import CopyPlace
from verl_slurm.checkpoint.tiers import s3
from verl_slurm.checkpoint.tiers.run_copies import RunCopies, run_prefix
from verl_slurm.checkpoint.tiers.survey import OpenTier, open_place
from verl_slurm.config.schema import RunConfig, TierConfig

_LOADER = botocore.session.create_loader()  # reading what S3 is takes half a second each time
NOW = datetime(2026, 1, 31, tzinfo=UTC)
PART = 64 << 10


@dataclass
class Bytes:
    """A `Source` in memory, a block of PART bytes at a time; dies before block `die_at` of the whole, from 1."""

    data: bytes
    die_at: int = 0

    def __call__(self, offset: int) -> Iterator[bytes]:
        for start in range(offset, len(self.data), PART):
            if start // PART + 1 == self.die_at:
                raise KeyboardInterrupt
            yield self.data[start : start + PART]


def content(size: int, seed: int = 1) -> bytes:
    """Bytes of which no two blocks are alike."""
    return hashlib.shake_128(b"%d" % seed).digest(size)


def entry(data: bytes, path: str = "actor/rank_0000.bin") -> FileEntry:
    return entry_of(path, data)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The standard chain finds these, and nothing of this machine's; botocore's pauses take no time."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testkey")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(botocore.endpoint, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(botocore.session, "create_loader", lambda search_path_string=None: _LOADER)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "MIN_PART_BYTES", PART)
    monkeypatch.setattr(s3, "PART_STEP_BYTES", PART)


@pytest.fixture
def server(small_parts: None) -> Iterator[StandIn]:
    stand_in = StandIn().start()
    yield stand_in
    stand_in.stop()


def s3_config(server: StandIn, **changes: Any) -> TierConfig:
    fields: dict[str, Any] = {"name": "store", "kind": "s3", "bucket": BUCKET, "endpoint": server.endpoint}
    return TierConfig(**(fields | {"region": "us-east-1"} | changes))


def posix_config(path: Path, **changes: Any) -> TierConfig:
    path.mkdir(exist_ok=True)
    return TierConfig(**({"name": path.name, "kind": "posix", "path": str(path)} | changes))


def _utc(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(private_dir(tmp_path / "run"))
    private_dir(paths.root)
    return paths


@pytest.fixture
def save(paths: RunPaths) -> Callable[..., Path]:
    """`save(step, days_ago, **manifest_changes)` → the committed directory."""

    def make(step: int, days_ago: float = 0, files: dict[str, bytes] = FILES, **changes: Any) -> Path:
        staging = stage(paths, step, 0, files)
        saved = {"created_utc": _utc(NOW - timedelta(days=days_ago))}
        return commit(staging, manifest_of(staging, **(saved | changes)), attempt_check=owns_it)

    return make


def small_checkpoint(paths: RunPaths, step: int, saved: datetime = NOW, attempt: int = 1) -> Path:
    """Makes a directory with a manifest of two files: less than a trainer would accept."""
    files = {
        "config.yaml": b"name: run\n",
        "actor/rank_0000.bin": content(150 << 10, seed=step + 1000 * attempt),
    }
    final = private_dir(paths.checkpoints / f"step_{step:06d}")
    for name, data in files.items():
        private_dir((final / name).parent)
        (final / name).write_bytes(data)
    entries = tuple(entry_of(name, data) for name, data in files.items())
    write_manifest(final, step, files=entries, created_utc=_utc(saved), attempt=attempt)
    return final


@pytest.fixture
def save_small(paths: RunPaths) -> Callable[..., Path]:
    """`save_small(step, days_ago)` → the directory of a `small_checkpoint`."""
    return lambda step, days_ago=0: small_checkpoint(paths, step, NOW - timedelta(days=days_ago))


def opened(
    paths: RunPaths, *tiers: TierConfig, wrap: Callable[[CopyPlace], CopyPlace] = lambda place: place
) -> list[OpenTier]:
    """As `open_tiers`, each place wrapped."""
    number = run_id(paths)
    return [
        OpenTier(config=t, copies=RunCopies(wrap(open_place(t)), run_prefix(t.prefix, "run", number)))
        for t in tiers
    ]


def copies_of(tier: OpenTier) -> RunCopies:
    assert tier.copies is not None
    return tier.copies


def config_of(*tiers: TierConfig) -> RunConfig:
    return RunConfig(name="run", tiers=tiers)
