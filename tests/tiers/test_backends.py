"""What `tiers.backend` demands, of every storage there is: a directory, a bucket, a real bucket (`make test-s3`)."""

import hashlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.conftest import FILES
from tests.tiers.conftest import (
    NOW,
    Bytes,
    config_of,
    content,
    entry,
    opened,
    posix_config,
    s3_config,
)
from tests.tiers.radosgw import BUCKET, Radosgw, running
from verl_slurm.base.errors import CheckpointCorrupt, TierError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.schema import TierConfig
from verl_slurm.tiers import s3
from verl_slurm.tiers.backend import Backend
from verl_slurm.tiers.fetch import fetch
from verl_slurm.tiers.mover import sync
from verl_slurm.tiers.multipart import part_size
from verl_slurm.tiers.opening import open_backend


@pytest.fixture(scope="session")
def radosgw() -> Iterator[Radosgw]:
    with running() as server:
        yield server


@pytest.fixture(params=["posix", "s3", "s3-checksum", pytest.param("radosgw", marks=pytest.mark.s3)])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TierConfig:
    if request.param == "posix":
        return posix_config(tmp_path / "tier")
    if request.param == "radosgw":
        server = request.getfixturevalue("radosgw")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret)
        return TierConfig(
            name="store",
            kind="s3",
            bucket=BUCKET,
            endpoint=server.endpoint,
            region="us-east-1",
            prefix=tmp_path.name,
        )
    verify = "checksum" if request.param.endswith("checksum") else "reread"
    return s3_config(request.getfixturevalue("server"), verify=verify)


@pytest.fixture
def backend(config: TierConfig) -> Backend:
    return open_backend(config)


@pytest.fixture
def key(config: TierConfig) -> str:
    return f"{config.prefix}/run-0/step_000001/actor/rank_0000.bin"


Alter = Callable[[str, bytes], None]


@pytest.fixture
def alter(config: TierConfig, backend: Any) -> Alter:
    """Put other bytes behind the mover's back, whatever they claim to be."""

    def change(key: str, data: bytes) -> None:
        if config.path is not None:
            (Path(config.path) / key).write_bytes(data)
        else:
            old = backend._client.head_object(Bucket=config.bucket, Key=key)
            backend._client.put_object(
                Bucket=config.bucket, Key=key, Body=data, Metadata=old.get("Metadata", {})
            )

    return change


def parts(config: TierConfig) -> int:
    """A size of several parts and a chunk's boundary."""
    return part_size(1) * 5 // 2 if config.bucket else 5 << 20


def test_what_was_put_is_there_whole_and_what_was_not_is_not(
    backend: Backend, config: TierConfig, key: str
) -> None:
    base = key.rpartition("/")[0]
    for size in (0, 1, parts(config), part_size(1), part_size(1) + 1):
        data = content(size, seed=size)
        name = f"{base}/{size}"
        assert backend.stat(name) is None
        assert backend.holds(name, entry(data)) == "missing"
        assert backend.put(name, Bytes(data), entry(data)) == size
        info = backend.stat(name)
        assert info is not None
        assert info.size == size
        assert b"".join(backend.blocks(name)) == data
        assert backend.read(name, size // 2, 10) == data[size // 2 : size // 2 + 10]
        assert backend.read(name, size, 10) == b""
        assert backend.holds(name, entry(data)) == ""
        assert backend.holds(name, entry(data + b"!")) == f"size {size}, expected {size + 1}"
    found = {info.key: info for info in backend.list(base)}
    assert {name: info.size for name, info in found.items()} == {
        f"{base}/{size}": size for size in (0, 1, parts(config), part_size(1), part_size(1) + 1)
    }
    assert all(backend.stat(name) == info for name, info in found.items())


def test_a_put_that_dies_anywhere_is_nothing_and_the_next_one_sends_only_the_rest(
    backend: Backend, config: TierConfig, key: str
) -> None:
    data = content(parts(config))
    whole = Bytes(data)
    backend.put(key, whole, entry(data))
    backend.delete(key)
    assert whole.reads > 1
    for number in range(1, whole.reads + 1):
        with pytest.raises(KeyboardInterrupt):
            backend.put(key, Bytes(data, die_at=number), entry(data))
        assert backend.stat(key) is None
        assert list(backend.list(config.prefix)) == []
    sent = backend.put(key, Bytes(data), entry(data))
    assert sent < len(data), "all of it was sent again"
    assert backend.holds(key, entry(data)) == ""


def test_other_bytes_under_the_same_name_replace_a_broken_upload(
    backend: Backend, config: TierConfig, key: str
) -> None:
    old, new = content(parts(config), seed=1), content(parts(config), seed=2)
    with pytest.raises(KeyboardInterrupt):
        backend.put(key, Bytes(old, die_at=2), entry(old))
    backend.put(key, Bytes(new), entry(new))
    assert b"".join(backend.blocks(key)) == new


def test_a_commit_record_is_written_once(backend: Backend, key: str) -> None:
    assert backend.commit(key, b"first")
    assert not backend.commit(key, b"second")
    assert backend.read(key, 0, 100) == b"first"


def test_what_was_removed_may_be_removed_again(backend: Backend, key: str) -> None:
    backend.put(key, Bytes(b"x"), entry(b"x"))
    backend.delete(key)
    backend.delete(key)
    assert backend.stat(key) is None
    assert list(backend.list(key.rpartition("/")[0])) == []


@pytest.mark.scenario("N05")
def test_uploads_under_way_are_given_up_except_those_that_go_on(
    backend: Backend, config: TierConfig, key: str
) -> None:
    data = content(parts(config))
    other = key.replace("step_000001", "step_000002")
    for name in (key, other):
        with pytest.raises(KeyboardInterrupt):
            backend.put(name, Bytes(data, die_at=2), entry(data))
    assert backend.forget(f"{config.prefix}/run-0/", [other.partition("actor")[0]]) == 1
    assert backend.forget(f"{config.prefix}/run-0/") == 1
    assert backend.forget(f"{config.prefix}/run-0/") == 0


@pytest.mark.scenario("N07")
def test_altered_bytes_are_found(backend: Backend, config: TierConfig, key: str, alter: Alter) -> None:
    if config.verify == "checksum":
        pytest.skip("believes the server, as its documentation says")
    for data in (b"a small object", content(parts(config))):
        backend.put(key, Bytes(data), entry(data))
        alter(key, data[:-1] + bytes([data[-1] ^ 1]))
        assert backend.holds(key, entry(data)).startswith("sha256 ")
        alter(key, data[:-1])
        assert backend.holds(key, entry(data)) == f"size {len(data) - 1}, expected {len(data)}"


def test_a_source_that_is_not_what_its_manifest_says_never_passes(
    backend: Backend, config: TierConfig, key: str
) -> None:
    """Even where nobody reads it back: `verify: checksum` would compare the server with the wrong bytes."""
    for data in (b"a small object", content(parts(config))):
        wrong = data[:-1] + bytes([data[-1] ^ 1])
        if config.bucket is not None:
            with pytest.raises(CheckpointCorrupt, match="source is damaged"):
                backend.put(key, Bytes(wrong), entry(data))
            assert backend.stat(key) is None
        else:
            backend.put(key, Bytes(wrong), entry(data))
            assert backend.holds(key, entry(data)).startswith("sha256 ")


def test_a_listing_shows_what_is_below_a_prefix_and_nothing_else(
    backend: Backend, config: TierConfig
) -> None:
    small: FileEntry = entry(b"x")
    names = [f"{config.prefix}/run-1/step_00000{i}/f" for i in range(8)]
    for name in [*names, f"{config.prefix}/run-2/f"]:
        backend.put(name, Bytes(b"x"), small)
    assert sorted(info.key for info in backend.list(f"{config.prefix}/run-1/")) == names
    assert list(backend.list(f"{config.prefix}/run-3/")) == []


@pytest.mark.s3
def test_a_real_server_holds_a_whole_checkpoint_and_gives_it_back(
    radosgw: Radosgw,
    paths: RunPaths,
    save: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", radosgw.secret)
    tier = TierConfig(
        name="store",
        kind="s3",
        bucket=BUCKET,
        endpoint=radosgw.endpoint,
        region="us-east-1",
        prefix="whole",
        keep_days=7,
    )
    old = save(10, 8, files=FILES | {"actor/rank_0000.bin": content(20 << 20)})
    tiers = opened(paths, tier)
    assert sync(paths, config_of(), tiers=tiers, now=lambda: NOW).ok
    old.rename(tmp_path / "lost")
    assert fetch(paths, config_of(), "step_000010", tiers=tiers).tier == "store"
    assert verify(old).ok
    save(20)
    sync(paths, config_of(), tiers=tiers, now=lambda: NOW)
    done = sync(paths, config_of(), tiers=tiers, now=lambda: NOW)
    assert [(d.action.kind, d.action.name, d.problem) for d in done.done] == [("drop", "step_000010", "")]
    assert tiers[0].backend is not None
    left = {info.key.split("/")[2] for info in tiers[0].backend.list("whole/")}
    assert left == {"step_000020"}


@pytest.mark.scenario("N07")
@pytest.mark.s3
def test_a_real_server_refuses_bytes_that_were_damaged_on_the_way(
    radosgw: Radosgw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We rely on that: each request that carries bytes carries their MD5."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", radosgw.secret)
    tier = TierConfig(name="store", kind="s3", bucket=BUCKET, endpoint=radosgw.endpoint, region="us-east-1")
    backend = open_backend(tier)
    monkeypatch.setattr(s3, "_md5_64", lambda data: b64encode(hashlib.md5(b"other").digest()).decode())
    with pytest.raises(TierError, match="BadDigest"):
        backend.put("damaged/x", Bytes(b"bytes"), entry(b"bytes"))
    assert backend.stat("damaged/x") is None


@pytest.mark.scenario("M08")
@pytest.mark.s3
def test_a_real_server_refuses_a_wrong_secret_and_ours_is_not_in_the_error(
    radosgw: Radosgw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    tier = TierConfig(name="store", kind="s3", bucket=BUCKET, endpoint=radosgw.endpoint, region="us-east-1")
    with pytest.raises(TierError, match="SignatureDoesNotMatch") as caught:
        list(open_backend(tier).list(""))
    assert "canary" not in caught.value.one_line()
