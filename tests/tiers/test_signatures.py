"""Where the run has a key, the tiers hold and give back what is signed with it, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.builders import write_config
from tests.checkpoint.sealed import save_sealed
from tests.journals import read_events
from tests.tiers.conftest import NOW, opened, posix_config
from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused, TierError
from verl_slurm.base.keys import Keyring, MasterKey, new_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.manifest import render, sealed
from verl_slurm.checkpoint.format.specification import MANIFEST
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.checkpoint.tiers.fetch import fetch, fetch_newest
from verl_slurm.checkpoint.tiers.mover import Pass, look, sync
from verl_slurm.config.schema import EncryptionConfig, RunConfig, TierConfig

Configure = Callable[..., RunConfig]


@pytest.fixture
def key(tmp_path: Path) -> MasterKey:
    tmp_path.chmod(0o700)
    return new_key_file(tmp_path / "run.key")


@pytest.fixture
def cold(tmp_path: Path) -> TierConfig:
    return posix_config(tmp_path / "cold", kind="archive")


@pytest.fixture
def configure(paths: RunPaths, tmp_path: Path, cold: TierConfig, key: MasterKey) -> Configure:
    """`configure(**encryption)` → the configuration with the key; `configure(None)` → without."""

    def make(*without: None, **encryption: Any) -> RunConfig:
        chosen = None if without else EncryptionConfig(key_file=str(tmp_path / "run.key"), **encryption)
        return write_config(paths, root=tmp_path, tiers=(cold,), encryption=chosen)

    return make


def move(paths: RunPaths, config: RunConfig) -> Pass:
    return sync(paths, config, now=lambda: NOW)


def there(cold: TierConfig) -> set[str]:
    return {path.parent.name for path in Path(str(cold.path)).rglob(MANIFEST)}


def forge(directory: Path) -> None:
    """Another attempt, with the digests in order and the signature of before."""
    manifest = msgspec.structs.replace(read_manifest(directory), attempt=7)
    (directory / MANIFEST).write_bytes(render(sealed(manifest)))
    assert verify(directory).ok


def failures(paths: RunPaths) -> list[str]:
    return [str(e["problem"]) for e in read_events(paths) if e["event"] == "tier_failed"]


@pytest.mark.parametrize("kind", ["unsigned", "another key", "forged"])
def test_what_is_not_signed_with_the_runs_key_is_not_copied_and_said_once(
    paths: RunPaths, key: MasterKey, cold: TierConfig, configure: Configure, kind: str
) -> None:
    save_sealed(paths, 10, key)
    bad = save_sealed(
        paths, 20, {"unsigned": None, "another key": MasterKey(bytes(range(32)))}.get(kind, key)
    )
    if kind == "forged":
        forge(bad)
    config = configure()
    for _ in range(2):
        done = move(paths, config)
    skipped = [action.reason for action in done.plan if action.kind == "skip"]
    assert there(cold) == {"step_000010"}
    assert len(failures(paths)) == 1
    assert skipped[0].startswith("not copied: ")
    assert bad.is_dir()


def test_accept_unsigned_lets_in_the_one_it_names(
    paths: RunPaths, cold: TierConfig, configure: Configure
) -> None:
    old, other = save_sealed(paths, 10, None), save_sealed(paths, 20, None)
    move(paths, configure())
    assert there(cold) == set()
    config = configure(accept_unsigned=read_manifest(old).digest)
    move(paths, config)
    assert there(cold) == {"step_000010"}
    for path in (old, other):
        path.rename(paths.root / path.name)
    assert fetch_newest(paths, config).name == "step_000010"


def test_a_forged_copy_in_a_tier_is_no_reason_to_let_another_go(
    paths: RunPaths, tmp_path: Path, key: MasterKey, cold: TierConfig, configure: Configure
) -> None:
    near = posix_config(tmp_path / "near", keep_days=7)
    save_sealed(paths, 10, key)
    save_sealed(paths, 20, key)
    config, tiers = configure(), opened(paths, near, cold)
    sync(paths, config, tiers=tiers, now=lambda: NOW.replace(year=2025, day=1))
    for directory in [path for path in Path(str(cold.path)).rglob("step_*") if path.is_dir()]:
        forge(directory)
    for _ in range(2):
        sync(paths, config, tiers=tiers, now=lambda: NOW)
    assert len(list(Path(str(near.path)).rglob(MANIFEST))) == 2


def test_a_memory_from_before_the_key_vouches_for_nothing(
    paths: RunPaths, key: MasterKey, configure: Configure
) -> None:
    save_sealed(paths, 10, None)
    save_sealed(paths, 20, key)
    move(paths, configure(None))
    config = configure()
    states = {(s.name, c.name): (c.verified, c.refused) for s in look(paths, config).states for c in s.copies}
    assert states["cold", "step_000010"] == (False, True)
    assert states["cold", "step_000020"] == (None, False)
    move(paths, config)
    states = {(s.name, c.name): (c.verified, c.refused) for s in look(paths, config).states for c in s.copies}
    assert states["cold", "step_000020"] == (True, False)


def test_what_comes_home_must_be_signed(
    paths: RunPaths, key: MasterKey, cold: TierConfig, configure: Configure, tmp_path: Path
) -> None:
    path = save_sealed(paths, 10, key)
    config = configure()
    move(paths, config)
    forge(next(p for p in Path(str(cold.path)).rglob("step_000010") if p.is_dir()))
    path.rename(tmp_path / "kept")
    with pytest.raises((KeyRefused, CheckpointCorrupt)):
        fetch(paths, config, "step_000010")
    with pytest.raises(TierError, match="none in a tier could be fetched"):
        fetch_newest(paths, config)
    assert not path.exists()


def test_one_that_lies_there_unsigned_is_not_taken_for_the_one_that_was_asked_for(
    paths: RunPaths, key: MasterKey, configure: Configure
) -> None:
    path = save_sealed(paths, 10, key)
    config = configure()
    move(paths, config)
    unsigned = msgspec.structs.replace(read_manifest(path), hmac=msgspec.UNSET)
    (path / MANIFEST).write_bytes(render(unsigned))
    with pytest.raises(KeyRefused, match="left where it is"):
        fetch(paths, config, "step_000010")
    assert path.is_dir()


def test_a_copy_whose_signature_was_taken_off_is_mended(
    paths: RunPaths, key: MasterKey, cold: TierConfig, configure: Configure
) -> None:
    path = save_sealed(paths, 10, key)
    config = configure()
    move(paths, config)
    stored = next(Path(str(cold.path)).rglob(MANIFEST))
    stored.write_bytes(render(msgspec.structs.replace(read_manifest(path), hmac=msgspec.UNSET)))
    assert move(paths, config).ok
    assert stored.read_bytes() == (path / MANIFEST).read_bytes()


def test_an_old_key_still_counts(
    paths: RunPaths, key: MasterKey, cold: TierConfig, configure: Configure, tmp_path: Path
) -> None:
    save_sealed(paths, 10, key)
    (tmp_path / "run.key").rename(tmp_path / "old.key")
    new = new_key_file(tmp_path / "run.key")
    assert verify(save_sealed(paths, 20, new), keys=Keyring(new)).ok
    move(paths, configure())
    assert there(cold) == {"step_000020"}
    move(paths, configure(old_key_files=(str(tmp_path / "old.key"),)))
    assert there(cold) == {"step_000010", "step_000020"}
