"""A bucket that never ends its answers: bounded in memory, pages and time, and a start goes on without it."""

import http.server
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.builders import write_config
from tests.checkpoint.conftest import manifest_of, stage
from tests.fakes.s3_server import BUCKET, StandIn, Stored
from tests.hostile.measured import measured_program
from tests.tiers.conftest import s3_config
from verl_slurm.base.errors import TierError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.checkpoint.format.manifest import render, sealed
from verl_slurm.checkpoint.format.specification import MANIFEST
from verl_slurm.config.schema import TierConfig
from verl_slurm.tiers.s3 import S3Backend
from verl_slurm.tiers.tier_layout import checkpoint_prefix, run_prefix

pytestmark = [pytest.mark.scenario("SEC07"), pytest.mark.slow]

MEMORY_MB = 400


class Hostile(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kind, self.numbers, self.over = kind, itertools.count(), threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self.over.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients leave in the middle: that is what is tested."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hostile

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        kind, number = self.server.kind, next(self.server.numbers)
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>t{number}</NextContinuationToken>"
        if kind in ("no keys", "many keys"):
            items = "".join(
                f"<Contents><Key>run-{'0' * 16}/step_{number * 1000 + n:06d}/x</Key>"
                "<Size>1</Size><ETag>e</ETag></Contents>"
                for n in range(1000 if kind == "many keys" else 0)
            )
            self._answer(200, f"<ListBucketResult>{items}{more}</ListBucketResult>".encode())
        elif kind == "trickle":
            self._head(200, 1 << 30)
            while not self.server.over.wait(0.05):
                self.wfile.write(b" ")
            self.close_connection = True  # or its client waits for the rest
        else:
            self._head(200 if kind == "blanks" else 403, 4 << 30)
            for _ in range(4096):
                self.wfile.write(b" " * (1 << 20))

    def _head(self, status: int, size: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def _answer(self, status: int, data: bytes) -> None:
        self._head(status, len(data))
        self.wfile.write(data)


@pytest.fixture
def hostile(request: pytest.FixtureRequest) -> Iterator[Hostile]:
    server = Hostile(request.param)
    yield server
    server.stop()
    # A call that was given up goes on, on a thread: its retries draw from Python's generator, also in later tests.
    for thread in threading.enumerate():
        if thread.name == "s3":
            thread.join(60)
            assert not thread.is_alive()


def tier_of(server: Hostile) -> TierConfig:
    endpoint = f"http://127.0.0.1:{server.server_port}"
    return TierConfig(name="store", kind="s3", bucket=BUCKET, endpoint=endpoint, region="us-east-1")


def run_with(tmp_path: Path, *tiers: TierConfig) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    for directory in (paths.root, paths.control, paths.checkpoints):
        private_dir(directory)
    write_config(paths, root=tmp_path, tiers=tiers)
    return paths


@pytest.mark.parametrize("hostile", ["no keys", "blanks", "long error"], indirect=True)
def test_a_listing_that_does_not_end_is_refused_in_bounded_memory(hostile: Hostile, tmp_path: Path) -> None:
    paths = run_with(tmp_path, tier_of(hostile))
    done = measured_program("verl_slurm.cli", "tiers", str(paths.root), "--json", timeout_s=120)
    assert done.code == ExitCode.TIER, done.err
    state = json.loads(done.out)["tiers"][1]
    assert (state["reachable"], state["checkpoints"]) == (False, [])
    assert "does not end" in state["detail"] or "too long" in state["detail"]
    assert done.peak_mb < MEMORY_MB


@pytest.mark.parametrize("hostile", ["no keys", "blanks"], indirect=True)
def test_a_start_goes_on_without_a_bucket_that_does_not_end(hostile: Hostile, tmp_path: Path) -> None:
    paths = run_with(tmp_path, tier_of(hostile))
    done = measured_program("verl_slurm.tiers", "restore", "--run", str(paths.root), timeout_s=120)
    assert done.code == ExitCode.OK, done.err
    answer = json.loads(done.out)
    assert answer["name"] is None
    assert "tier store does not answer" in answer["reasons"][0]


@pytest.mark.parametrize("hostile", ["many keys"], indirect=True)
def test_keys_without_end_are_counted(hostile: Hostile) -> None:
    backend = S3Backend(tier_of(hostile), most_keys=20_000)
    with pytest.raises(TierError, match="a listing does not end") as refused:
        list(backend.list("run-"))
    assert "21000 keys" in str(refused.value)


@pytest.mark.parametrize("hostile", ["trickle"], indirect=True)
def test_a_byte_now_and_then_is_no_answer(hostile: Hostile) -> None:
    backend = S3Backend(tier_of(hostile), call_s=1.0)
    began = time.monotonic()
    with pytest.raises(TierError, match="too slow"):
        list(backend.list("run-"))
    with pytest.raises(TierError, match="too slow"):
        backend.read("key", 0, 100)
    assert time.monotonic() - began < 60


def test_a_claim_of_more_than_the_disk_has_room_for_fetches_nothing(server: StandIn, tmp_path: Path) -> None:
    tier = s3_config(server)
    paths = run_with(tmp_path, tier)
    prefix = checkpoint_prefix(run_prefix(tier.prefix, "run", run_id(paths)), "step_000010")
    staging = stage(paths, 10)
    manifest = manifest_of(staging)
    claims = msgspec.structs.replace(manifest.files[0], size=1 << 50, leaves=())
    forged = sealed(msgspec.structs.replace(manifest, files=(claims, *manifest.files[1:])))
    for entry in forged.files:
        server.objects[prefix + entry.path] = Stored((staging.directory / entry.path).read_bytes(), {}, '"e"')
    server.objects[prefix + claims.path].data = Longer(b"x")
    server.objects[prefix + MANIFEST] = Stored(render(forged), {}, '"e"')
    shutil.rmtree(staging.directory)
    done = measured_program(
        "verl_slurm.cli", "tiers", str(paths.root), "--fetch-back", "step_000010", timeout_s=120
    )
    assert done.code == ExitCode.NO_ROOM, done.err
    assert "what its manifest claims" in done.err
    assert {call.key for call in server.calls if call.op == "GetObject"} == {prefix + MANIFEST}
    assert os.listdir(paths.checkpoints) == []


class Longer(bytes):
    """An object of which the listing says that it is a pebibyte."""

    def __len__(self) -> int:
        return 1 << 50
