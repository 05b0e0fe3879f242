"""A bucket behind a line that cuts, flips bits and swallows: the stand-in, and a real server (`make test-s3`)."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import botocore.endpoint
import psutil
import pytest

from tests.builders import write_config
from tests.fakes import s3_server
from tests.fakes.faulty_proxy import Chaos, proxied
from tests.fakes.s3_server import Call, StandIn, Stored
from tests.journals import read_events
from tests.tiers.conftest import NOW, PART, Bytes, config_of, content, copies_of, entry, opened, s3_config
from tests.tiers.radosgw import BUCKET, running
from verl_slurm.base.errors import CheckpointCorrupt, NotFound, TierError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.copies import content_problem
from verl_slurm.checkpoint.tiers.fetch import fetch
from verl_slurm.checkpoint.tiers.mover import Pass, sync
from verl_slurm.checkpoint.tiers.s3 import S3Place, part_size
from verl_slurm.checkpoint.tiers.survey import OpenTier, open_place
from verl_slurm.config.schema import TierConfig

pytestmark = pytest.mark.slow

Save = Callable[..., Path]
KEY = "p/run-0/step_000001/actor/rank_0000.bin"


@dataclass
class Line:
    """A server, what the line to it does, and the tier behind it."""

    chaos: Chaos
    config: TierConfig

    def place(self, **options: Any) -> Any:
        return S3Place(self.config, **options)


@pytest.fixture(scope="module")
def radosgw() -> Iterator[Any]:
    with running() as server:
        yield server


@pytest.fixture(params=["stand-in", pytest.param("radosgw", marks=pytest.mark.s3)])
def line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    fields: dict[str, Any] = {"name": "store", "kind": "s3", "region": "us-east-1"}
    if request.param == "radosgw":
        server = request.getfixturevalue("radosgw")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret)
        fields["bucket"] = BUCKET
    else:
        server = request.getfixturevalue("server")
        fields["bucket"] = "bucket"
    with proxied(urlsplit(server.endpoint).port) as chaos:
        yield Line(chaos, TierConfig(**fields, endpoint=f"http://127.0.0.1:{chaos.port}"))


def several_parts() -> bytes:
    return content(part_size(1) * 5 // 2)


# ---- N05: no server worth the name


@pytest.mark.scenario("N05")
def test_a_black_hole_is_given_up_and_the_next_attempt_goes_on_behind_it(line: Line) -> None:
    data = several_parts()
    with pytest.raises(KeyboardInterrupt):  # some of it is there
        line.place().put(KEY, entry(data), Bytes(data, die_at=-(-len(data) // PART)))
    line.chaos.stall = True
    impatient = line.place(read_s=0.1, attempts=2)
    for use in (
        lambda: impatient.put(KEY, entry(data), Bytes(data)),
        lambda: impatient.stat(KEY),
        lambda: list(impatient.read(KEY, 0, 10)),
        lambda: list(impatient.read(KEY)),
        lambda: list(impatient.list("p/")),
        lambda: impatient.commit(f"{KEY}.json", b"{}"),
    ):
        with pytest.raises(TierError, match="object store failed"):
            use()
    line.chaos.stall = False
    place = line.place()
    assert place.put(KEY, entry(data), Bytes(data)) < len(data), "all of it was sent again"
    assert content_problem(place, KEY, entry(data)) == ""
    assert place.forget("p/") == 0, "an upload was left"
    place.delete(KEY)


@pytest.mark.scenario("N05")
def test_a_line_that_is_cut_every_64_kib_brings_all_of_it_down(line: Line) -> None:
    data = content(20 * PART)
    place = line.place()
    place.put(KEY, entry(data), Bytes(data))
    line.chaos.cut_down_after = 64 << 10
    before = line.chaos.connections
    assert b"".join(line.place().read(KEY)) == data
    assert content_problem(line.place(), KEY, entry(data)) == ""
    assert b"".join(line.place().read(KEY, 1000, 10 * PART)) == data[1000 : 1000 + 10 * PART]
    assert line.chaos.connections - before > 2 * 20 + 10
    line.chaos.cut_down_after = None
    place.delete(KEY)


@pytest.mark.scenario("N05")
def test_a_line_that_is_cut_every_64_kib_takes_nothing_up_and_that_is_said_and_mended(line: Line) -> None:
    """A part is larger. Tried a bounded number of times; nothing half-made counts, and no upload stays."""
    data = several_parts()
    line.chaos.cut_after = 64 << 10
    place = line.place()
    before = line.chaos.connections
    with pytest.raises(TierError, match="object store failed"):
        place.put(KEY, entry(data), Bytes(data))
    assert line.chaos.connections - before <= 8 * 5
    line.chaos.cut_after = None
    place = line.place()
    assert place.stat(KEY) is None
    place.put(KEY, entry(data), Bytes(data))
    assert content_problem(place, KEY, entry(data)) == ""
    assert place.forget("p/") == 0, "an upload was left"
    place.delete(KEY)


@pytest.mark.scenario("N05")
def test_credentials_that_expire_within_an_upload_end_it_at_once_and_new_ones_go_on(server: StandIn) -> None:
    data, config = content(20 * PART), s3_config(server)
    refused: list[Call] = []

    def expire(call: Call) -> str | None:
        if server.count("UploadPart") <= 8:
            return None
        refused.append(call)
        return "denied"

    server.fault = expire
    with pytest.raises(TierError, match="ExpiredToken 403"):
        open_place(config).put(KEY, entry(data), Bytes(data))
    assert len(refused) <= 4, "asked again with what is no longer good"
    (upload,) = server.uploads.values()
    there = len(upload.parts)
    assert there == 8
    server.fault = lambda call: None
    assert open_place(config).put(KEY, entry(data), Bytes(data)) == len(data) - there * PART
    assert server.uploads == {}


@pytest.mark.scenario("N05")
def test_a_busy_server_is_asked_a_bounded_number_of_times_with_pauses_that_grow_and_differ(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(botocore.endpoint, "time", SimpleNamespace(sleep=pauses.append))
    server.fault = lambda call: "503"
    for _ in range(2):
        with pytest.raises(TierError, match="SlowDown 503"):
            list(open_place(s3_config(server)).list("p/"))
    assert len(server.calls) == 2 * 5
    assert all(0 <= pause <= 2**number for number, pause in enumerate(pauses[:4]))
    assert len(set(pauses)) == len(pauses) == 2 * 4, "everybody would come back in the same instant"


@pytest.mark.scenario("N05")
def test_uploads_of_what_nobody_wants_any_more_are_given_up(
    paths: RunPaths, save_small: Save, server: StandIn, tiers: list[OpenTier]
) -> None:
    final = save_small(10)
    server.fault = lambda call: "503" if call.op == "CompleteMultipartUpload" else None
    assert not run_pass(paths, tiers).ok
    assert len(server.uploads) == 1
    server.fault = lambda call: None
    final.rename(paths.root / "gone")
    save_small(20)
    assert run_pass(paths, tiers).ok
    assert server.uploads == {}


@pytest.mark.scenario("N05")
def test_whoever_waits_for_a_black_hole_is_a_process_of_the_lowest_priority_and_may_be_killed(
    paths: RunPaths, save_small: Save, server: StandIn
) -> None:
    """So training waits for no bucket; the next pass goes on."""
    save_small(10)
    with proxied(server.server_port) as chaos:
        behind = s3_config(server, endpoint=f"http://127.0.0.1:{chaos.port}")
        write_config(paths, tiers=(behind,))
        asked, chaos.stall = threading.Event(), True
        chaos.on_stall = asked.set
        argv = [sys.executable, "-m", "verl_slurm.checkpoint.tiers", "sync", "--run", str(paths.root)]
        with subprocess.Popen(argv) as child:
            try:
                assert asked.wait(60)
                process = psutil.Process(child.pid)
                assert process.nice() == 19
                assert process.ionice() == (psutil.IOPRIO_CLASS_BE, 7)
            finally:
                child.kill()
    done = run_pass(paths, opened(paths, s3_config(server)))
    assert done.ok
    assert len(done.done) == 1


# ---- N06: done, and nobody says so


@pytest.mark.scenario("N05", "N06")
@pytest.mark.parametrize("fault", ["503", "cut", "lose"])
def test_one_fault_at_any_request_leaves_the_same_objects_with_the_same_bytes(
    paths: RunPaths, save_small: Save, server: StandIn, tiers: list[OpenTier], fault: str
) -> None:
    save_small(10)
    assert run_pass(paths, tiers).ok
    wanted = objects(server)
    number, done = 0, False
    while not done:
        number += 1
        server.objects.clear()
        server.calls.clear()
        paths.tier_records.unlink(missing_ok=True)
        server.fault = lambda call, number=number: fault if len(server.calls) == number else None  # type: ignore[misc]
        within = run_pass(paths, tiers)
        done = len(server.calls) < number
        assert within.ok or fault == "lose", f"request {number}"
        server.fault = lambda call: None
        run_pass(paths, tiers)
        assert objects(server) == wanted, f"request {number}"
        assert server.uploads == {}, f"request {number}"
    assert number > 12


# ---- N07: a bit


@pytest.mark.scenario("N07")
def test_a_bit_that_flips_on_the_way_up_is_refused_there_and_one_on_the_way_down_is_found(line: Line) -> None:
    for data in (content(60 << 10), several_parts()):
        place = line.place()
        line.chaos.flip_up = 1
        with pytest.raises(TierError, match="BadDigest|XAmzContentSHA256Mismatch"):
            place.put(KEY, entry(data), Bytes(data))
        assert line.chaos.flip_up == 0
        assert place.stat(KEY) is None
        place.put(KEY, entry(data), Bytes(data))
        line.chaos.flip_down = 1
        assert content_problem(place, KEY, entry(data)).startswith("sha256 ")
        assert line.chaos.flip_down == 0
        assert content_problem(place, KEY, entry(data)) == ""
        assert place.forget("p/") == 0
        place.delete(KEY)


@pytest.mark.scenario("N07")
def test_each_flipped_bit_is_in_the_journal_and_the_checkpoint_is_whole_in_the_end(
    paths: RunPaths, save_small: Save, server: StandIn
) -> None:
    final = save_small(10)
    with proxied(server.server_port) as chaos:
        behind = opened(paths, s3_config(server, endpoint=f"http://127.0.0.1:{chaos.port}"))
        chaos.flip_up = 1
        assert not run_pass(paths, behind).ok
        assert journaled(paths) == 1
        chaos.flip_down = 1  # in the reading back: sent again, then right
        assert run_pass(paths, behind).ok
        assert run_pass(paths, behind).done == ()
    assert chaos.flip_down == 0
    stored = {key.rpartition("step_000010/")[2]: stored.data for key, stored in server.objects.items()}
    assert stored == {
        str(path.relative_to(final)): path.read_bytes() for path in final.rglob("*") if path.is_file()
    }


# ---- N09: what else lies in a bucket


@pytest.mark.scenario("N09")
def test_ten_thousand_foreign_keys_hide_nothing_and_are_neither_read_nor_removed(
    paths: RunPaths, save_small: Save, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_server, "PAGE", 1000)
    save_small(10)
    tiers = opened(paths, s3_config(server, keep_days=7))
    run = copies_of(tiers[0]).prefix
    strange = ["../../x", "notes.txt", "step_000010/../../etc", "step_1/manifest.json", "step_000010/a b"]
    foreign = [f"{run}../../{number}" for number in range(5000)] + [f"{run}step_{n}/x" for n in range(5001)]
    foreign += [
        f"verl-slurm/run-{'f' * 16}/step_000001/manifest.json",
        *(run + name for name in strange[:-1]),
    ]
    for key in foreign:
        server.objects[key] = Stored(b"not ours", {}, '"x"')
    assert run_pass(paths, tiers).ok
    save_small(20)
    assert run_pass(paths, tiers).ok
    server.objects[run + strange[-1]] = Stored(b"not ours", {}, '"x"')
    done = sync(paths, config_of(), tiers=tiers, now=lambda: NOW + timedelta(days=9)).done
    assert [(d.action.kind, d.action.name) for d in done] == [("drop", "step_000010")], "ours were not seen"
    assert server.count("ListObjectsV2") >= 2 * 11
    assert all(server.objects[key].data == b"not ours" for key in [*foreign, run + strange[-1]])


@pytest.mark.scenario("N09")
@pytest.mark.parametrize("path", ["../../evil", "/tmp/evil", "actor/../../../evil", "actor//evil"])
def test_a_commit_record_that_names_a_place_outside_writes_nothing_there(
    paths: RunPaths, save_small: Save, server: StandIn, tiers: list[OpenTier], path: str
) -> None:
    final = save_small(10)
    assert run_pass(paths, tiers).ok
    (key,) = [key for key in server.objects if key.endswith("manifest.json")]
    manifest = json.loads(server.objects[key].data)
    manifest["files"][0]["path"] = path
    server.objects[key] = Stored(json.dumps(manifest).encode(), {}, '"y"')
    final.rename(paths.root / "kept")
    everything = sorted(paths.root.parent.rglob("*"))
    with pytest.raises((CheckpointCorrupt, NotFound, TierError)):
        fetch(paths, config_of(), "step_000010", tiers=tiers)
    written = [entry for entry in sorted(paths.root.parent.rglob("*")) if entry not in everything]
    assert [entry for entry in written if entry.is_file() and paths.control not in entry.parents] == []


@pytest.mark.s3
@pytest.mark.scenario("N09")
def test_what_was_deleted_in_a_bucket_with_versions_is_gone_for_us_and_may_come_again(
    radosgw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", radosgw.secret)
    tier = TierConfig(
        name="store", kind="s3", bucket="versioned", endpoint=radosgw.endpoint, region="us-east-1"
    )
    place: Any = open_place(tier)
    place._client.create_bucket(Bucket="versioned")
    place._client.put_bucket_versioning(Bucket="versioned", VersioningConfiguration={"Status": "Enabled"})
    for data in (b"first", b"second"):
        assert place.commit(KEY, data)
        assert b"".join(place.read(KEY, 0, 100)) == data
        place.delete(KEY)
        assert place.stat(KEY) is None
        assert list(place.list("p/")) == []


def run_pass(paths: RunPaths, tiers: list[OpenTier]) -> Pass:
    return sync(paths, config_of(), tiers=tiers, now=lambda: NOW)


@pytest.fixture
def tiers(paths: RunPaths, server: StandIn) -> list[OpenTier]:
    return opened(paths, s3_config(server))


def objects(server: StandIn) -> dict[str, bytes]:
    return {key: stored.data for key, stored in server.objects.items()}


def journaled(paths: RunPaths) -> int:
    return sum(event["event"] == "tier_failed" for event in read_events(paths))
