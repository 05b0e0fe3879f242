"""A bucket that never ends its answers: bounded in memory, pages and time, and a start goes on without it."""

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.builders import write_config
from tests.checkpoint.conftest import manifest_of, stage
from tests.fakes.s3_server import Call, StandIn, Stored
from tests.hostile.measured import measured_program
from tests.tiers.conftest import s3_config
from verl_slurm.base.errors import TierError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.checkpoint.format.manifest import render, sealed
from verl_slurm.checkpoint.format.specification import MANIFEST
from verl_slurm.checkpoint.tiers.run_copies import run_prefix
from verl_slurm.checkpoint.tiers.s3 import S3Place
from verl_slurm.config.schema import TierConfig

pytestmark = [pytest.mark.scenario("SEC07"), pytest.mark.slow]

MEMORY_MB = 400


def hostile(kind: str) -> Callable[[Call], tuple[int, int, Iterable[bytes]]]:
    """A fault of `StandIn`."""
    numbers = itertools.count()

    def answer(call: Call) -> tuple[int, int, Iterable[bytes]]:
        number = next(numbers)
        if kind in ("no keys", "many keys"):
            items = "".join(
                f"<Contents><Key>run-{'0' * 16}/step_{number * 1000 + n:06d}/x</Key>"
                "<Size>1</Size><ETag>e</ETag></Contents>"
                for n in range(1000 if kind == "many keys" else 0)
            )
            more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>t{number}</NextContinuationToken>"
            data = f"<ListBucketResult>{items}{more}</ListBucketResult>".encode()
            return 200, len(data), [data]
        if kind == "trickle":
            return 200, 1 << 30, trickle()
        return 200 if kind == "blanks" else 403, 4 << 30, itertools.repeat(b" " * (1 << 20), 4096)

    return answer


def trickle() -> Iterator[bytes]:
    """Ends when its reader has gone."""
    while True:
        time.sleep(0.05)  # as slow as that is the fault
        yield b" "


def run_with(tmp_path: Path, *tiers: TierConfig) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    for directory in (paths.root, paths.control, paths.checkpoints):
        private_dir(directory)
    write_config(paths, root=tmp_path, tiers=tiers)
    return paths


@pytest.mark.parametrize("kind", ["no keys", "long error"])
def test_a_listing_that_does_not_end_is_refused_in_bounded_memory(
    server: StandIn, tmp_path: Path, kind: str
) -> None:
    server.fault = hostile(kind)
    paths = run_with(tmp_path, s3_config(server))
    done = measured_program("verl_slurm.cli", "tiers", str(paths.root), "--json", timeout_s=120)
    assert done.code == ExitCode.TIER, done.err
    state = json.loads(done.out)["tiers"][1]
    assert (state["reachable"], state["checkpoints"]) == (False, [])
    assert "does not end" in state["detail"] or "too long" in state["detail"]
    assert done.peak_mb < MEMORY_MB


def test_a_start_goes_on_without_a_bucket_that_does_not_end(server: StandIn, tmp_path: Path) -> None:
    server.fault = hostile("blanks")
    paths = run_with(tmp_path, s3_config(server))
    done = measured_program("verl_slurm.checkpoint.tiers", "restore", "--run", str(paths.root), timeout_s=120)
    assert done.code == ExitCode.OK, done.err
    answer = json.loads(done.out)
    assert answer["name"] is None
    assert "tier store does not answer" in answer["reasons"][0]


def test_keys_without_end_are_counted(server: StandIn) -> None:
    server.fault = hostile("many keys")
    place = S3Place(s3_config(server), most_keys=20_000)
    with pytest.raises(TierError, match="a listing does not end") as refused:
        list(place.list("run-"))
    assert "21000 keys" in str(refused.value)


def test_a_byte_now_and_then_is_no_answer(server: StandIn) -> None:
    server.fault = hostile("trickle")
    place = S3Place(s3_config(server), call_s=1.0)
    began = time.monotonic()
    with pytest.raises(TierError, match="too slow"):
        list(place.list("run-"))
    with pytest.raises(TierError, match="too slow"):
        list(place.read("key", 0, 100))
    assert time.monotonic() - began < 60


def test_a_claim_of_more_than_the_disk_has_room_for_fetches_nothing(server: StandIn, tmp_path: Path) -> None:
    tier = s3_config(server)
    paths = run_with(tmp_path, tier)
    prefix = run_prefix(tier.prefix, "run", run_id(paths)) + "step_000010/"
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
