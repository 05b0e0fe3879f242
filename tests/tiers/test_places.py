"""What `checkpoint.store.copies` demands, of every place: a directory, a bucket, a real bucket (`make test-s3`)."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.conftest import FILES
from tests.fakes.s3_server import Call, StandIn
from tests.tiers.conftest import (
    NOW,
    PART,
    Bytes,
    config_of,
    content,
    copies_of,
    entry,
    opened,
    posix_config,
    s3_config,
)
from tests.tiers.radosgw import BUCKET, Radosgw, running
from verl_slurm.base.errors import CheckpointCorrupt, TierError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, FileEntry
from verl_slurm.checkpoint.store.copies import CopyPlace, DirectoryPlace, checked, content_problem
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.checkpoint.tiers.fetch import fetch
from verl_slurm.checkpoint.tiers.mover import sync
from verl_slurm.checkpoint.tiers.s3 import MAX_PARTS, part_size
from verl_slurm.checkpoint.tiers.survey import open_place
from verl_slurm.config.schema import TierConfig


@pytest.fixture(scope="session")
def radosgw() -> Iterator[Radosgw]:
    with running() as server:
        yield server


@pytest.fixture(params=["posix", "s3", "s3-checksum", pytest.param("radosgw", marks=pytest.mark.s3)])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TierConfig:
    if request.param == "posix":
        request.getfixturevalue("small_parts")
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
def place(config: TierConfig) -> CopyPlace:
    return open_place(config)


@pytest.fixture
def key(config: TierConfig) -> str:
    return f"{config.prefix}/run-0/step_000001/actor/rank_0000.bin"


Alter = Callable[[str, bytes], None]


@pytest.fixture
def alter(config: TierConfig, place: Any) -> Alter:
    """Put other bytes behind the mover's back, whatever they claim to be."""

    def change(key: str, data: bytes) -> None:
        if config.path is not None:
            (Path(config.path) / key).write_bytes(data)
        else:
            old = place._client.head_object(Bucket=config.bucket, Key=key)
            place._client.put_object(
                Bucket=config.bucket, Key=key, Body=data, Metadata=old.get("Metadata", {})
            )

    return change


def test_what_was_put_is_there_whole_and_what_was_not_is_not(
    place: CopyPlace, config: TierConfig, key: str
) -> None:
    base, sizes = key.rpartition("/")[0], (0, 1, part_size(1), part_size(1) + 1, part_size(1) * 5 // 2)
    for size in sizes:
        data = content(size, seed=size)
        name = f"{base}/{size}"
        assert place.stat(name) is None
        assert content_problem(place, name, entry(data)) == "missing"
        assert place.put(name, entry(data), Bytes(data)) == size
        info = place.stat(name)
        assert info is not None
        assert info.size == size
        assert b"".join(place.read(name)) == data
        assert b"".join(place.read(name, size // 2, 10)) == data[size // 2 : size // 2 + 10]
        assert b"".join(place.read(name, size, 10)) == b""
        assert content_problem(place, name, entry(data)) == ""
        assert content_problem(place, name, entry(data + b"!")) == f"size {size}, expected {size + 1}"
    found = {info.key: info for info in place.list(base)}
    assert {name: info.size for name, info in found.items()} == {f"{base}/{size}": size for size in sizes}
    assert all(place.stat(name) == info for name, info in found.items())


def test_a_put_that_dies_anywhere_is_nothing_and_the_next_one_sends_only_the_rest(
    place: CopyPlace, config: TierConfig, key: str
) -> None:
    data = content(part_size(1) * 5 // 2)
    blocks = -(-len(data) // PART)
    for number in range(1, blocks + 1, max(1, blocks // 5)):  # a real server has parts of 8 MiB
        with pytest.raises(KeyboardInterrupt):
            place.put(key, entry(data), Bytes(data, die_at=number))
        assert place.stat(key) is None
        assert list(place.list(config.prefix)) == []
    assert place.put(key, entry(data), Bytes(data)) < len(data), "all of it was sent again"
    assert content_problem(place, key, entry(data)) == ""


def test_other_bytes_under_the_same_name_replace_a_broken_upload(place: CopyPlace, key: str) -> None:
    old, new = (content(part_size(1) * 5 // 2, seed=seed) for seed in (1, 2))
    with pytest.raises(KeyboardInterrupt):
        place.put(key, entry(old), Bytes(old, die_at=2))
    place.put(key, entry(new), Bytes(new))
    assert b"".join(place.read(key)) == new


def test_what_a_source_raises_passes_and_makes_no_object(place: CopyPlace, key: str) -> None:
    """Even where nobody reads it back: `verify: checksum` would compare the server with the wrong bytes."""
    for data in (b"a small object", content(part_size(1) * 5 // 2)):
        wrong = data[:-1] + bytes([data[-1] ^ 1])
        with pytest.raises(CheckpointCorrupt, match="not those of the checkpoint"):
            place.put(key, entry(data), lambda offset: checked(Bytes(wrong)(offset), entry(data)))  # noqa: B023
        assert place.stat(key) is None


def test_a_commit_record_is_written_once(place: CopyPlace, key: str) -> None:
    assert place.commit(key, b"first")
    assert not place.commit(key, b"second")
    assert b"".join(place.read(key, 0, 100)) == b"first"


def test_what_was_removed_may_be_removed_again(place: CopyPlace, key: str) -> None:
    place.put(key, entry(b"x"), Bytes(b"x"))
    place.delete(key)
    place.delete(key)
    assert place.stat(key) is None
    assert list(place.list(key.rpartition("/")[0])) == []


def test_a_directory_outlives_the_last_file_in_it(tmp_path: Path) -> None:
    place = DirectoryPlace(tmp_path / "outer" / "root", "here")
    (tmp_path / "outer" / "root").mkdir(parents=True)
    for key in ("file", "folder/file", "prefix/run/step/actor/file"):
        place.put(key, entry(b"x"), Bytes(b"x"))
        place.delete(key)
    assert sorted(path.name for path in (tmp_path / "outer" / "root").rglob("*")) == ["folder", "prefix"]


@pytest.mark.scenario("N05")
def test_uploads_under_way_are_given_up_except_those_that_go_on(
    place: CopyPlace, config: TierConfig, key: str
) -> None:
    data = content(part_size(1) * 5 // 2)
    other = key.replace("step_000001", "step_000002")
    for name in (key, other):
        with pytest.raises(KeyboardInterrupt):
            place.put(name, entry(data), Bytes(data, die_at=2))
    assert place.forget(f"{config.prefix}/run-0/", [other.partition("actor")[0]]) == 1
    assert place.forget(f"{config.prefix}/run-0/") == 1
    assert place.forget(f"{config.prefix}/run-0/") == 0


@pytest.mark.scenario("N07")
def test_altered_bytes_are_found(place: CopyPlace, config: TierConfig, key: str, alter: Alter) -> None:
    if config.verify == "checksum":
        pytest.skip("believes the server, as its documentation says")
    for data in (b"a small object", content(part_size(1) * 5 // 2)):
        place.put(key, entry(data), Bytes(data))
        alter(key, data[:-1] + bytes([data[-1] ^ 1]))
        assert content_problem(place, key, entry(data)).startswith("sha256 ")
        alter(key, data[:-1])
        assert content_problem(place, key, entry(data)) == f"size {len(data) - 1}, expected {len(data)}"


def test_a_listing_shows_what_is_below_a_prefix_and_nothing_else(
    place: CopyPlace, config: TierConfig
) -> None:
    small: FileEntry = entry(b"x")
    names = [f"{config.prefix}/run-1/step_00000{i}/f" for i in range(8)]
    for name in [*names, f"{config.prefix}/run-2/f"]:
        place.put(name, small, Bytes(b"x"))
    assert sorted(info.key for info in place.list(f"{config.prefix}/run-1/")) == names
    assert list(place.list(f"{config.prefix}/run-3/")) == []


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
    assert set(copies_of(tiers[0]).objects()) == {"step_000020"}


@pytest.mark.scenario("M08")
@pytest.mark.s3
def test_a_real_server_refuses_a_wrong_secret_and_ours_is_not_in_the_error(
    radosgw: Radosgw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    tier = TierConfig(name="store", kind="s3", bucket=BUCKET, endpoint=radosgw.endpoint, region="us-east-1")
    with pytest.raises(TierError, match="SignatureDoesNotMatch") as caught:
        list(open_place(tier).list(""))
    assert "canary" not in caught.value.one_line()


# ---- a bucket's uploads in parts


_CHILD = """
import sys
from pathlib import Path
from tests.tiers.conftest import Bytes, PART, entry
from verl_slurm.config.schema import TierConfig
from verl_slurm.checkpoint.tiers import s3
from verl_slurm.checkpoint.tiers.survey import open_place
s3.MIN_PART_BYTES = s3.PART_STEP_BYTES = PART
data = Path(sys.argv[2]).read_bytes()
tier = TierConfig(name="store", kind="s3", bucket="bucket", endpoint=sys.argv[1], region="us-east-1")
open_place(tier).put("p/r/f", entry(data), Bytes(data))
"""


def test_a_part_is_as_small_as_the_number_of_parts_allows() -> None:
    for size in (1, 8 << 20, 78 << 30, 1 << 40, 5 << 40):
        cut = part_size(size)
        assert cut >= 8 << 20
        assert cut % (1 << 20) == 0
        assert -(-size // cut) <= MAX_PARTS
    assert part_size(1 << 40) == 105 << 20


@pytest.mark.scenario("N05")
def test_an_upload_whose_process_was_killed_goes_on_where_it_was(server: StandIn, tmp_path: Path) -> None:
    data = content(20 * PART)
    (tmp_path / "data").write_bytes(data)
    reached = threading.Event()

    def stall(call: Call) -> str | None:
        if call.op == "UploadPart" and server.count("UploadPart") > 12:
            reached.set()
            return "cut"
        return None

    server.fault = stall
    words = [sys.executable, "-c", _CHILD, server.endpoint, str(tmp_path / "data")]
    child = subprocess.Popen(words, cwd=Path(__file__).parents[2], env=os.environ, stderr=subprocess.DEVNULL)
    try:
        assert reached.wait(60)
    finally:
        child.kill()
        child.wait()
    assert server.objects == {}
    (upload,) = server.uploads.values()
    there = len(upload.parts)
    assert there >= 8
    server.fault = lambda call: None
    sent = open_place(s3_config(server)).put("p/r/f", entry(data), Bytes(data))
    assert sent == len(data) - there * PART
    assert server.objects["p/r/f"].data == data
    assert server.uploads == {}


def test_a_part_that_the_server_has_wrong_is_sent_again(server: StandIn) -> None:
    data = content(5 * PART)
    place = open_place(s3_config(server))
    with pytest.raises(KeyboardInterrupt):
        place.put("p/r/f", entry(data), Bytes(data, die_at=5))
    (upload,) = server.uploads.values()
    number = min(upload.parts)
    upload.parts[number] = b"rot" + upload.parts[number][3:]
    place.put("p/r/f", entry(data), Bytes(data))
    assert server.objects["p/r/f"].data == data


def test_where_the_checksum_is_believed_another_one_is_refused(server: StandIn) -> None:
    for data in (content(5 * PART), b"small"):
        place = open_place(s3_config(server, verify="checksum"))
        server.fault = lambda call: "flip" if call.op in ("UploadPart", "PutObject") else None
        with pytest.raises(TierError, match="server's checksum"):
            place.put("p/r/f", entry(data), Bytes(data))


def test_a_server_that_ignores_ranges_is_not_believed(server: StandIn) -> None:
    data = content(PART // 2)
    place = open_place(s3_config(server))
    place.put("p/r/f", entry(data), Bytes(data))
    server.fault = lambda call: "no_range"
    with pytest.raises(TierError, match="another range"):
        list(place.read("p/r/f", 10, 10))
    assert b"".join(place.read("p/r/f", 0, 10)) == data[:10], "no more than was asked for"


def test_bytes_are_those_of_their_entry_or_refused_at_the_first_chunk_that_is_wrong() -> None:
    for size in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 7):
        data = content(size, seed=size)
        blocks = [data[at : at + 3_000_001] for at in range(0, size, 3_000_001)]
        assert b"".join(checked(blocks, entry(data))) == data
        wrong = [[*blocks, b"!"], blocks[:-1] if blocks else [b"?"]]
        wrong += [[bytes([blocks[0][0] ^ 1]) + blocks[0][1:], *blocks[1:]]] if blocks else []
        for other in wrong:
            got = checked(other, entry(data))
            with pytest.raises(CheckpointCorrupt) as refused:
                assert len(b"".join(got)) <= size
            assert str(refused.value.found).startswith(("sha256 ", "size ", "more than"))
