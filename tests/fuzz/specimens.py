"""Valid inputs of every parser in the table, and what makes checksums right again (`seal`)."""

import hashlib
import hmac
import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgpack
import msgspec
import numpy as np
import zstandard
from verl_slurm_daemon.journal import Status

from tests.builders import make_manifest, owner, reward_switch, runtime_state
from tests.harness import ROOT
from verl_slurm.checkpoint.format import manifest, state_schema
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, FileEntry, Manifest
from verl_slurm.checkpoint.format.tensor_index import (
    Piece,
    TensorEntry,
    TensorIndex,
    render_index,
    tensor_file,
)
from verl_slurm.checkpoint.store.chunks import entry_of
from verl_slurm.config.load import dump, parse_config
from verl_slurm.dataset.fingerprint import cache as hash_cache
from verl_slurm.dataset.fingerprint.file_hashing import Hashed
from verl_slurm.runtime_state.codec import encode
from verl_slurm.runtime_state.format import Arrays
from verl_slurm.runtime_state.record import pack
from verl_slurm.runtime_state.rollout_records import response_entry
from verl_slurm.runtime_state.samples import Sample, StepSamples
from verl_slurm.runtime_state.segment import frame, head
from verl_slurm.runtime_state.token_log import Calls
from verl_slurm.save.writer.protocol import SaverReady, Written
from verl_slurm.wire import messages
from verl_slurm.wire.framing import Framer
from verl_slurm.wire.lead_file import LeadAddress
from verl_slurm.wire.reward_plan import RewardPlan, RewardRequest

KEY, ATTEMPT, RUN_ID = b"k" * 32, 3, "0123456789abcdef"
_HASH = "ab" * 32
DIGEST = "c0" * 8
"""Of what verl's responses answer."""
FROZEN = "c0" * 32
"""A model's copy in RUN/frozen."""


def _batch() -> Arrays:
    draw = np.random.default_rng(1)
    return {
        "prompt_ids": draw.integers(0, 300, (4, 5)),
        "response_mask": np.tile(np.array([True, True, False]), (4, 1)),
        "logprobs": draw.standard_normal((4, 3)).astype(np.float32),
    }


# ---- runtime state


def states() -> Sequence[bytes]:
    small = runtime_state()
    full = msgspec.structs.replace(
        small,
        phase="update",
        kl_window=[0.1, 0.25],
        rng={"python": b"\x00state", "torch": bytes(range(100))},
        rollouts=_batch(),
        rewards={"scores": np.array([0.5, np.nan, -np.inf]), "scalar": np.array(3, np.int32)},
        history=[{"reward": 0.5, "loss": float("nan")}, {"reward": 0.75}],
    )
    wide = msgspec.structs.replace(
        small, rollouts={"ids": np.arange(5000, dtype=np.int64), "none": np.zeros((2, 0))}
    )
    # So empty that it is cut into smaller frames.
    empty = msgspec.structs.replace(small, rewards={"zeros": np.zeros(40 << 20, np.uint8)})
    return [encode(state) for state in (small, full, wide, empty)]


def state_parts() -> Sequence[bytes]:
    return [taken_apart(data) for data in states()[:3]]


def taken_apart(data: bytes) -> bytes:
    """A record as {"head": list, "frames": [content]}; `seal_record` puts it together."""
    (size,) = struct.unpack_from("<I", data, 16)
    head = msgpack.unpackb(_content(data[20 : 20 + size]))
    at, contents = 20 + size, []
    for length in head[2]:
        contents.append(_content(data[at : at + length]))
        at += length
    return bytes(msgpack.packb({"head": head, "frames": contents}))


def _content(data: bytes) -> bytes:
    return bytes(zstandard.ZstdDecompressor().decompress(data))


def _zstd(content: bytes) -> bytes:
    return bytes(zstandard.ZstdCompressor(level=1, write_checksum=True).compress(content))


def seal_record(data: bytes) -> bytes:
    parts = _unpacked(data)
    try:
        head, contents = parts["head"], [_zstd(content) for content in parts["frames"]]
        if len(data) % 4 and isinstance(head, list):  # else the frames' sizes stay as they were mutated
            head[2] = [len(content) for content in contents]
        packed = _zstd(msgpack.packb(head, unicode_errors="surrogatepass"))
        return b"".join([struct.pack("<II8sI", 0x184D2A5B, 12, b"VSRECRD1", len(packed)), packed, *contents])
    except (TypeError, KeyError, IndexError, ValueError, OverflowError):
        return data


def _unpacked(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
    except (ValueError, RecursionError, OverflowError, TypeError):
        return None


# ---- random generators


def generators() -> Sequence[bytes]:
    """States by generator, their long tables left out: a tree with what is not a table."""
    from verl_slurm.save.ranks import rng

    random.seed(1)
    state = rng.capture()
    words, torch = struct.unpack("<I625Id", state["python"]), state["torch"]
    made = {
        "python": [words[0], words[1], words[625], words[626]],
        "numpy": list(struct.unpack("<IId", state["numpy"][4 * 624 :])),
        "torch": [torch[:24], torch[24:-40], torch[-40:]],
    }
    return [bytes(msgpack.packb(made))]


def generator_states(data: bytes) -> dict[str, bytes] | None:
    """What `generators` stands for, or None where it is nothing that a runtime state could hold."""
    parts = _unpacked(data)
    try:
        version, first, position, spare = parts["python"]
        return {
            "python": struct.pack("<I625Id", version, *[first] * 624, position, spare),
            "numpy": struct.pack("<624I", *range(624)) + struct.pack("<IId", *parts["numpy"]),
            "torch": b"".join(parts["torch"]),
        }
    except (TypeError, KeyError, ValueError, struct.error, OverflowError):
        return None


# ---- responses and tokens of verl, by what reads them


def responses() -> Sequence[bytes]:
    """The records of responses, taken apart."""
    output = {
        "response_ids": [5, 6, 7],
        "response_logprobs": [-0.5, -0.25, -0.125],
        "extra_fields": {"why": "x", "acc": np.float32(0.5), "scores": np.arange(6.0).reshape(2, 3)},
    }
    made = [response_entry(0, 0, outputs, DIGEST) for outputs in ([output], [output, {"num_turns": 2}])]
    return [taken_apart(one.record) for one in made]


def logged_tokens() -> Sequence[bytes]:
    """The record of two calls' tokens, taken apart."""
    calls = [(position, 0, 0, DIGEST, 0, 2, 3, False) for position in (0, 1)]
    arrays: Arrays = {"ids": np.arange(4), "log_probs": np.zeros(4, np.float32)}
    return [taken_apart(pack(Calls(1, calls), arrays))]


def in_segment(data: bytes) -> bytes:
    """A segment with that record."""
    return head(ATTEMPT, 0) + frame(RUN_ID, 0, 0, seal_record(data))


# ---- ledger


@cache
def _record() -> bytes:
    return pack(None, _batch())


def ledgers() -> Sequence[bytes]:
    records = [frame(RUN_ID, step, micro, _record()) for step, micro in ((0, 0), (0, 1), (1, 0))]
    whole = head(ATTEMPT, 0) + b"".join(records)
    return [whole, head(ATTEMPT, 0), whole + records[0][:40], whole[:100] + records[1]]


def ledger_parts() -> Sequence[bytes]:
    records = [[step, micro, _record()] for step, micro in ((0, 0), (0, 1), (1, 0))]
    return [bytes(msgpack.packb({"attempt": ATTEMPT, "rank": 0, "records": records}))]


def seal_ledger(data: bytes) -> bytes:
    parts = _unpacked(data)
    try:
        records = b"".join(frame(RUN_ID, *record) for record in parts["records"])
        return head(parts["attempt"], parts["rank"]) + records
    except (TypeError, KeyError, struct.error, OverflowError):
        # Overlapping records, every header whole: each asks for the CRC of all that follows.
        size = min(len(data), 4000) // 4
        fields = struct.pack("<4sIQII8s", b"VSLR", size * 4, 1, 1, zlib.crc32(data), bytes.fromhex(RUN_ID))
        return head(ATTEMPT, 0) + (fields + struct.pack("<I", zlib.crc32(fields))) * max(size // 7, 1) + data


# ---- JSON with a digest in it


def manifests() -> Sequence[bytes]:
    files = [
        FileEntry(path=p, size=3, sha256=_HASH)
        for p in ("config.yaml", "actor/__0_0.distcp", "actor/.metadata")
    ]
    files.append(entry_of("actor/rank_0000.bin", bytes(CHUNK_BYTES + 1)))
    made = make_manifest(
        12,
        name="step_000012_sp0007",
        safe_point=7,
        phase="update",
        attempt=ATTEMPT,
        parent="step_000010",
        world_size=2,
        files=tuple(files),
        frozen={"reference": _HASH},
    )
    return [manifest.render(manifest.sealed(made))]


def seal_manifest(data: bytes) -> bytes:
    try:
        raw = json.loads(data)
        raw["digest"] = manifest.manifest_digest(msgspec.convert(raw, Manifest))
        return json.dumps(raw).encode()
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return data


def indexes() -> Sequence[bytes]:
    halves = (
        Piece(file=tensor_file(0), at=0, offset=(0, 0), shape=(3, 2)),
        Piece(file=tensor_file(1), at=64, offset=(3, 0), shape=(1, 2)),
    )
    scalar = (Piece(file=tensor_file(0), at=128, offset=(), shape=()),)
    tensors = {
        "w": TensorEntry(dtype="bfloat16", shape=(4, 2), pieces=halves),
        "step": TensorEntry(dtype="float32", shape=(), pieces=scalar),
    }
    run = Piece(file=tensor_file(0), at=192, offset=(0, 0), shape=(2, 1), count=3, every=2, axis=1)
    runs = tensors | {"v": TensorEntry(dtype="int8", shape=(2, 3), pieces=(run,))}
    return [render_index(TensorIndex.of(tensors)), render_index(TensorIndex.of(runs))]


def from_saver() -> Sequence[bytes]:
    entry = FileEntry(path="actor/rank_0000.bin", size=3, sha256=_HASH)
    written = Written(save=1, directory="/run/checkpoints/x", files=(entry,), error="full", errno=28)
    return [msgspec.json.encode(message) for message in (SaverReady(), written)]


def schemas() -> Sequence[bytes]:
    small = state_schema.schema_of({"RuntimeState": {"rank": "int", "step": "int"}}, "1.0")
    return [state_schema.render_schema(state_schema.current_schema()), state_schema.render_schema(small)]


def seal_schema(data: bytes) -> bytes:
    try:
        raw = json.loads(data)
        raw["schema_id"] = hashlib.sha256(manifest.canonical(raw["classes"])).hexdigest()
        return json.dumps(raw).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return data


def fingerprints() -> Sequence[bytes]:
    files = {
        "a.jsonl": {"kind": "file", "size": 3, "sha256": _HASH},
        "b/c.jsonl": {"kind": "link", "size": 0, "sha256": _HASH},
        "empty": {"kind": "directory", "size": 0, "sha256": ""},
    }
    return [seal_fingerprint(json.dumps({"digest": "", "files": files, "format": 1}, indent=1).encode())]


def seal_fingerprint(data: bytes) -> bytes:
    """The digest of the entries as dataset/fingerprint/entries.py specifies it."""
    try:
        raw = json.loads(data)
        digest = hashlib.sha256(b"verl-slurm tree 1\n")
        for path, entry in sorted(raw["files"].items(), key=lambda item: item[0].encode()):
            line = "\0".join((entry["kind"], path, str(entry["size"]), entry["sha256"]))
            digest.update(line.encode() + b"\n")
        return json.dumps(raw | {"digest": digest.hexdigest()}).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return data


# ---- small files of a run


def attempts() -> Sequence[bytes]:
    made = owner(attempt=ATTEMPT, cluster="slurm", job_id="12_3", restart=1, host="node1", pid=77)
    return [msgspec.json.encode(made)]


def reward_plans() -> Sequence[bytes]:
    switches = tuple(
        reward_switch(
            "classifier:/models/rm",
            7 * number,
            request=number,
            digest="c0" * 32,
            warm_start_steps=10,
            recorded_utc="2025-01-01T00:00:00+00:00",
        )
        for number in (1, 2)
    )
    return [msgspec.json.encode(RewardPlan(handled=3, refused="no", switches=switches))]


def reward_requests() -> Sequence[bytes]:
    made = RewardRequest(number=3, reward="python:m:f", warm_start_steps=10, asked_utc="2025-01-01T00:00:00Z")
    return [msgspec.json.encode(made)]


def step_rows() -> Sequence[bytes]:
    row = {
        "time": "2025-01-01T00:00:00.000+00:00",
        "attempt": 1,
        "step": 7.0,
        "reward": 0.25,
        "eval/reward": 0.5,
        "step_s": 1.5,
    }
    return [
        json.dumps(row).encode(),
        b"".join(json.dumps(row | {"step": n}).encode() + b"\n" for n in range(9)),
    ]


def frozen_records() -> Sequence[bytes]:
    return fingerprints()


def quarantine_reasons() -> Sequence[bytes]:
    record = {"name": "step_000012", "reasons": ["why"], "until_gone": ".step_000012.c0c0c0c0c0c0c0c0.tmp"}
    return [json.dumps(record).encode()]


def lead_addresses() -> Sequence[bytes]:
    return [
        msgspec.json.encode(
            LeadAddress(attempt=ATTEMPT, restart=2, host="10.0.0.1", port=40123, token="c0" * 32)
        )
    ]


def statuses() -> Sequence[bytes]:
    made = Status(
        state="running",
        job_id="12",
        attempt=ATTEMPT,
        step=7,
        steps=50,
        phase="update",
        metrics={"reward": 0.5},
    )
    return [msgspec.json.encode(made), b"{}"]


def events() -> Sequence[bytes]:
    told: list[dict[str, Any]] = [
        {"event": "submitted", "job_id": "12", "cluster": "slurm"},
        {
            "event": "started",
            "job_id": "12",
            "cluster": "slurm",
            "requeues": 1,
            "nodes": "node[1-2]",
            "attempt": 3,
        },
        {"event": "restart", "number": 1, "resume": "step_000010", "progress": ["step_000010", 64]},
        {"event": "training", "step": 10, "phase": "generate", "index": 2},
        {"event": "cause", "cause": "preempted", "seconds_left": 29.5, "evidence": "PreemptTime"},
        {"event": "save", "stop": True},
        {
            "event": "saved",
            "name": "step_000010_sp0007",
            "emergency": True,
            "num_bytes": 12345678,
            "seconds": 0.4,
        },
        {"event": "verified", "name": "step_000010_sp0007", "detail": "12 files"},
        {"event": "crash", "crashes": 1, "budget": 3, "detail": "rank 0: killed"},
        {"event": "orphaned", "node_id": 1, "accepted": True, "detail": ""},
        {"event": "requeue", "job_id": "12", "delay_s": 3},
        {"event": "ended", "exit_code": 25, "reason": "requeued", "seconds": 3.5},
    ]
    lines = [
        msgspec.json.encode({"time": "2025-01-01T00:00:00.000+00:00", "job_id": "12"} | event)
        for event in told
    ]
    # One line each as well: a tree can be made of those.
    return [*lines, b"\n".join(lines) + b"\n", b"\n".join(lines)[:-30]]


def http_heads() -> Sequence[bytes]:
    return [
        b"GET /metrics?x=1 HTTP/1.1\r\nHost: localhost:9464\r\nAccept: text/plain\r\n\r\n",
        b"POST /alert HTTP/1.0\r\nContent-Length: 12\r\nAuthorization: Bearer abcdef\r\n\r\n",
    ]


def orchestrations() -> Sequence[bytes]:
    made = {
        "version": 1,
        "began": "2026-11-27T09:00:00+01:00",
        "data_root": "/data",
        "data_files": {"a.jsonl": _HASH},
        "dataset_fingerprint": _HASH,
        "world_size": 2,
        "nodes": 1,
        "topology": {"dp": 2, "tp": 1, "pp": 1},
        "device_groups": {"dp": [[0, 1]]},
        "backend": "gloo",
        "shard_map": {"0": "all", "1": "none"},
        "log_paths": {"events": "events.jsonl"},
        "metric_history": {"curves": "tensorboard"},
    }
    return [json.dumps(made, indent=1).encode()]


# ---- wire


def to_agent() -> Sequence[bytes]:
    launch = messages.Launch(
        restart=1, attempt=3, node_rank=0, master_addr="10.0.0.1", master_port=1, resume=""
    )
    stop = messages.SaveRequest(request_id=1, stop=True, seconds_left=25.0)
    return [msgspec.msgpack.encode(message) for message in (launch, stop, messages.Shutdown())]


def from_rank() -> Sequence[bytes]:
    where = {"step": 3, "phase": "update", "index": 1, "safe_points": 9, "new_rollouts": 64}
    told = (
        messages.RankStarted(rank=0, pid=5),
        messages.Progress(rank=0, metrics={"reward": 0.5}, **where),  # type: ignore[arg-type]
        messages.SaveStarted(rank=0, request_id=1, step=3, safe_point=2),
        messages.PartSaved(rank=0, request_id=1),
        messages.RankSaved(rank=0, request_id=1, name="step_000003_sp0002", seconds=0.5, num_bytes=1000),
        messages.SavedOnNodes(rank=0, request_id=1, name="step_000003", seconds=0.5, num_bytes=1000),
        messages.RankSaveFailed(rank=0, request_id=1, reason="no space"),
        messages.RankRefused(rank=0, exit_code=17, reason="corrupt"),
    )
    return [msgspec.msgpack.encode(message) for message in told]


def from_agent() -> Sequence[bytes]:
    ready = messages.AgentReady(node="node1", node_id=0, address="10.0.0.1", free_port=40123)
    ended = messages.NodeExited(node="node1", exit_code=-9, detail="rank 0: killed")
    return [*(msgspec.msgpack.encode(message) for message in (ready, ended)), *from_rank()[:2]]


def wire_frames() -> Sequence[bytes]:
    """Three frames of an agent, one behind the other."""
    framer: Framer[Any] = Framer(KEY, b"A", messages.FromAgent)
    decoder: Any = msgspec.msgpack.Decoder(messages.FromAgent)
    return [b"".join(framer.encode(decoder.decode(data)) for data in from_agent()[:3])]


def frames(payload: bytes, direction: bytes) -> bytes:
    """One frame of any payload, under our key; what a hostile peer that has it could send."""
    mac = hmac.digest(KEY, direction + struct.pack(">Q", 0) + payload, "sha256")
    return struct.pack(">IQ32s", len(payload), 0, mac) + payload


def control_pages() -> Sequence[bytes]:
    return [(b"VSPAGE01" + struct.pack("=QQQ", 1, 1, 10**12)).ljust(4096, b"\0")]


# ---- what people and Slurm write


def run_configs() -> Sequence[bytes]:
    shipped = (ROOT / "configs/quickstart.yaml").read_bytes()
    short = b"name: run\ntrain:\n  steps: 5\nslurm: {partition: a, extra: {constraint: a100}}\n"
    return [shipped, short, short, dump(parse_config(shipped, "shipped"))]


def yaml_with_aliases() -> Sequence[bytes]:
    return [
        b"a: &a {n: 3, lr: 1e-5, b: [x, 'y', \"z\\n\"]}\nc: {<<: *a, n: 4}\nd: [*a, *a]\n",
        b"a: &a {n: 3}\nb: &b\n  <<: *a\n  m: |\n    text\nc:\n  <<: [*a, *b]\n  n: ~\n",
    ]


def overrides() -> Sequence[bytes]:
    return [b"train.steps=50", b"slurm.partition=null", b"name=007", b"slurm.extra={constraint: a100}"]


def hostfiles() -> Sequence[bytes]:
    return [b"worker-0 slots=8\nworker-1 slots=8   # the second\n\n", b"10.0.0.1 slots=1\n"]


def scontrol_jobs() -> Sequence[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / "tests/slurm/golden").glob("*.txt"))]


def scontrol_nodes() -> Sequence[bytes]:
    return [
        (
            b"NodeName=node1 Arch=x86_64 CoresPerSocket=1 \n   CPUAlloc=2 CPUEfctv=2 CPUTot=2 CPULoad=0.37\n"
            b"   NodeAddr=127.0.0.1 NodeHostName=localhost Port=18540 Version=22.05.8\n"
            b"   OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0 \n   State=DOWN*+DRAIN ThreadsPerCore=1 TmpDisk=0\n"
            b"   Reason=Not responding [slurm@2026-11-21T00:50:00]\n"
        )
    ]


def partitions() -> Sequence[bytes]:
    return [
        (
            b"PartitionName=urgent\n   AllocNodes=ALL Default=NO QoS=N/A\n"
            b"   DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO\n"
            b"   MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED\n"
            b"   OverTimeLimit=NONE PreemptMode=OFF\n"
            b"   State=UP TotalCPUs=8 TotalNodes=4 SelectTypeParameters=NONE\n"
        )
    ]


def model_configs() -> Sequence[bytes]:
    return [b'{"model_type": "qwen2", "hidden_size": 64, "layer_types": ["full"], "rope": {"theta": 1e6}}']


def safetensors() -> Sequence[bytes]:
    header = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
    return [struct.pack("<Q", len(header)) + header + bytes(16)]


def torch_zips() -> Sequence[bytes]:
    """As torch.save writes them: records that are stored, with their checksums."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in (
            ("a/data.pkl", b"\x80\x02}q\x00."),
            ("a/data/0", bytes(64)),
            ("a/version", b"3\n"),
        ):
            archive.writestr(zipfile.ZipInfo(name), data)
    return [buffer.getvalue()]


def trackers() -> Sequence[bytes]:
    return [b"6", b" 1200\n"]


def table_rows() -> Sequence[bytes]:
    return [b"1 + 1 =,2\n", b'"a, b\r\nc","""q"""\n"x ""y""",7\n']


def data_rows() -> Sequence[bytes]:
    return [
        b'{"prompt": "1 + 1 =", "answer": "2"}\n',
        b'{"prompt": "a", "answer": "b", "more": [1, {"x": null}]}\n',
    ]


def samples() -> Sequence[bytes]:
    """A step of `samples.jsonl`."""
    sample = Sample(sample_id=1, prompt="1+1=", response="2", answer="2", reward=1.0, response_tokens=1)
    step = StepSamples(time="2026-11-22", run=RUN_ID, attempt=1, step=3, responses=8, samples=[sample])
    return [msgspec.json.encode(step)]


def hash_caches() -> Sequence[bytes]:
    """Of a tree of one file."""
    return [hash_cache.encode({"a": Hashed((2, 3, 4_000_000_000, 5_000_000_000), "1" * 64, 0o100600)})]
