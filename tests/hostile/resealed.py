"""Files of a checkpoint made hostile, and the manifest made to fit them, as who hands one over would."""

import hashlib
import json
import os
from pathlib import Path

from tests.hostile.measured import Measured

ROOM_MB = 300.0
HOLE = 1 << 29
MIB = 1 << 20


def bomb(size: int, before: bytes = b"", after: bytes = b"") -> bytes:
    """JSON of `size` bytes that is nearly all empty lists: each takes three bytes here and 72 in Python."""
    return before + b"[" + b"[]," * ((size - 4) // 3) + b"1]" + after


def reseal(checkpoint: Path, name: str) -> None:
    """Put the present size and digest of a file into the manifest, as who hands it over would."""
    path, manifest = checkpoint / name, json.loads((checkpoint / "manifest.json").read_bytes())
    leaves = []
    with path.open("rb") as file:
        while block := file.read(4 * MIB):
            leaves.append(hashlib.sha256(block).digest())
    whole = leaves[0] if len(leaves) == 1 else hashlib.sha256(b"".join(leaves)).digest()
    entry = {"path": name, "size": path.stat().st_size, "sha256": whole.hex()}
    entry["leaves"] = [leaf.hex() for leaf in leaves] if len(leaves) > 1 else []
    files = [entry, *(other for other in manifest["files"] if other["path"] != name)]
    manifest["files"] = sorted(files, key=lambda one: str(one["path"]))
    del manifest["digest"]
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    manifest["digest"] = hashlib.sha256(text).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def put(checkpoint: Path, name: str, data: bytes | None) -> None:
    """Give a file of a checkpoint this content; None: a hole."""
    path = checkpoint / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data or b"")
    if data is None:
        os.truncate(path, HOLE)
    path.chmod(0o600)
    reseal(checkpoint, name)


def one_line(done: Measured) -> str:
    assert done.err.count("\n") == 1, done.err[-2000:]
    assert done.err.startswith("verl-slurm: ")
    return done.err
