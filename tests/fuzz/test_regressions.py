"""What the fuzzers found, as short as it gets, and bombs that they would seldom build."""

import contextlib
import os
import struct
import zlib

import msgspec
import pytest

from tests.fuzz import engine, specimens
from tests.fuzz.table import TARGETS
from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt
from verl_slurm.base.paths import CHECKPOINT_NAME
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.cli.show.story import progress, tell
from verl_slurm.journal.files import parse_event
from verl_slurm.runtime_state import codec, segment

_TARGETS = {target.name: target for target in TARGETS}
_NOT_UTF8, _DEEP = b'{"attempt": "\xff"}', b"[" * 50_000
_JSON = (
    "attempt",
    "lead.json",
    "events.jsonl",
    "status.json",
    "orchestration.json",
    "config.json of a model",
)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *(
            (name, data)
            for name in (*_JSON, "rows of a data file")
            for data in (_NOT_UTF8, _DEEP, b"", b"[]")
        ),
        ("lead.json", specimens.lead_addresses()[0].replace(b"c0c0", b"/../")),
        ("lead.json", specimens.lead_addresses()[0].replace(b"40123", b"70000")),
        ("status.json", b'{"step": [], "steps": {}, "metrics": {"reward": "x", "kl": true}, "index": "a"}'),
        ("one event", b'{"event": "started", "job_id": "1", "requeues": "x"}'),
        (
            "one event",
            b'{"event": "saved", "job_id": "1", "num_bytes": "x", "time": "0001-01-01T00:00:00+23:59"}',
        ),
        ("one event", b'{"event": "force_resume", "job_id": "1", "added": 3}'),
        ("packets of a rank", b"\x81\xa4type\xa1\xff"),
        ("packets of a rank", b"\x91" * 50_000),
        ("frames to the lead, sealed", specimens.frames(b"\x81\xa4type\xa1\xff", b"A")),
        ("frames to the lead, sealed", specimens.frames(b"\x91" * 50_000, b"A")),
        ("run.yaml", b"train: {batch_size_per_device: 9007199254740993, mini_batch_size_per_device: 64}"),
        (
            "run.yaml",
            b"train: {batch_size_per_device: 9007199254740993, mini_batch_size_per_device: 9007199254740992}",
        ),
        ("hostfile", b"worker-\xe9 slots=8\n"),
        ("scontrol show node", b"State=DOWN*\n"),
        ("safetensors header", struct.pack("<Q", 50_000) + _DEEP),
        ("safetensors header", struct.pack("<Q", 5) + b'{"\xff":'),
    ],
)
def test_found_and_mended(name: str, data: bytes) -> None:
    target = _TARGETS[name]
    with contextlib.suppress(*target.raises):
        target.parse(data)


def test_the_errors_of_decoders_are_all_that_is_caught() -> None:
    assert issubclass(msgspec.DecodeError, UNREADABLE)


def test_a_damaged_event_is_told_as_it_is() -> None:
    event = parse_event(b'{"event": "saved", "time": "x", "num_bytes": "many"}')
    assert event is not None
    assert tell(event) == "--:--:--  saved num_bytes=many"
    assert progress({}) == progress({"metrics": {"reward": 10**400}}) == "step 0"


def test_digits_of_other_scripts_or_too_many_make_no_checkpoint_name() -> None:
    assert CHECKPOINT_NAME.fullmatch("step_000001")
    for name in ("step_٠٠٠٠٠١", f"step_{'9' * 5000}", f"step_000001_sp{'9' * 5000}"):
        assert checkpoint_order(name) is None


def test_a_head_of_empty_lists_is_no_memory_bomb() -> None:
    """178 bytes took 312 MB: four million empty lists."""
    count = (4 << 20) - 64
    head = specimens._zstd(b"\x93\x81\xa1x\xdd" + struct.pack(">I", count) + b"\x90" * count)
    data = struct.pack("<II8sI", 0x184D2A5B, 12, b"VSRECRD1", len(head)) + head

    def decode() -> None:
        with pytest.raises(CheckpointCorrupt):
            codec.decode(data)

    assert engine._memory_of(decode) < 50_000_000


@pytest.mark.parametrize("good_between", [False, True])
def test_frames_that_lie_in_each_other_are_not_read_again_and_again(
    monkeypatch: pytest.MonkeyPatch, good_between: bool
) -> None:
    """4 MiB of them took 44 s."""
    size, good = 256 << 10, segment.frame("00" * 8, 1, 1, b"")
    data = bytearray(segment.head(3, 0))
    while len(data) < size // 2:
        fields = struct.pack("<4sIQII8s", b"VSLR", size - len(data) - 36, 1, 1, 0, bytes(8))
        data += fields + struct.pack("<I", zlib.crc32(fields)) + (good if good_between else b"")
    data += bytes(size - len(data))
    read = 0
    payload = segment.Frame.payload

    def counted(self: segment.Frame, fd: int) -> bytes | None:
        nonlocal read
        read += self.length
        return payload(self, fd)

    monkeypatch.setattr(segment.Frame, "payload", counted)
    fd = os.memfd_create("segment")
    try:
        os.write(fd, data)
        items = list(segment.scan(fd, 3, 0, "00" * 8))
    finally:
        os.close(fd)
    assert read < 3 * size
    assert items[-1] == segment.Gap(
        offset=items[-1].offset, end=size, torn=False
    )  # reported, and never cut away
