"""An upload in parts: where it is cut, and that a kill of the whole process costs little more than a part."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.fakes.s3_server import Call, StandIn
from tests.tiers.conftest import PART, Bytes, content, entry, s3_config
from verl_slurm.base.errors import TierError
from verl_slurm.tiers.multipart import MAX_PARTS, part_size
from verl_slurm.tiers.opening import open_backend

_CHILD = """
import sys
from pathlib import Path
from tests.tiers.conftest import Bytes, PART, entry
from verl_slurm.config.schema import TierConfig
from verl_slurm.tiers import multipart
from verl_slurm.tiers.opening import open_backend
multipart.MIN_PART_BYTES = multipart._ROUND = PART
data = Path(sys.argv[2]).read_bytes()
tier = TierConfig(name="store", kind="s3", bucket="bucket", endpoint=sys.argv[1], region="us-east-1")
open_backend(tier).put("p/r/f", Bytes(data), entry(data))
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
    sent = open_backend(s3_config(server)).put("p/r/f", Bytes(data), entry(data))
    assert sent == len(data) - there * PART
    assert server.objects["p/r/f"].data == data
    assert server.uploads == {}


def test_a_part_that_the_server_has_wrong_is_sent_again(server: StandIn) -> None:
    data = content(5 * PART)
    backend = open_backend(s3_config(server))
    with pytest.raises(KeyboardInterrupt):
        backend.put("p/r/f", Bytes(data, die_at=5), entry(data))
    (upload,) = server.uploads.values()
    number = min(upload.parts)
    upload.parts[number] = b"rot" + upload.parts[number][3:]
    backend.put("p/r/f", Bytes(data), entry(data))
    assert server.objects["p/r/f"].data == data


def test_where_the_checksum_is_believed_another_one_is_refused(server: StandIn) -> None:
    for data in (content(5 * PART), b"small"):
        backend = open_backend(s3_config(server, verify="checksum"))
        server.fault = lambda call: "flip" if call.op in ("UploadPart", "PutObject") else None
        with pytest.raises(TierError, match="another part|server's checksum"):
            backend.put("p/r/f", Bytes(data), entry(data))


def test_a_server_that_ignores_ranges_is_not_believed(server: StandIn) -> None:
    data = content(PART // 2)
    backend = open_backend(s3_config(server))
    backend.put("p/r/f", Bytes(data), entry(data))
    server.fault = lambda call: "no_range"
    with pytest.raises(TierError, match="another range"):
        backend.read("p/r/f", 10, 10)
    assert backend.read("p/r/f", 0, 10) == data[:10], "no more than was asked for"
