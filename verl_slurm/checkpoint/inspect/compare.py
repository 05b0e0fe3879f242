"""Lists how two checkpoints differ: one row per difference, with both sides.

`difference` looks at position, state layout, configuration, topology, data, frozen models, and names, types and shapes
of the tensors, or of a guest's files. Each file is checked against its digest first. Times, attempts and parents are
left out: they differ in any two saves.

`compare` tells whether two hold the same state, bit for bit. Both are verified first. Compared are digests: of all
weights and all optimizer state, tensor by tensor, whatever ranks saved them (of the bytes, so NaN equals the same NaN,
and 0.0 differs from -0.0); of each rank's runtime state, value by value; of the schedulers; of a guest's files.
"""

import ctypes
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.keys import Keyring
from verl_slurm.base.packages import require_packages
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, FileEntry, Manifest
from verl_slurm.checkpoint.format.state_schema import SchemaVersion, parse_schema
from verl_slurm.checkpoint.format.tensor_index import (
    DTYPE_BYTES,
    Piece,
    TensorEntry,
    TensorIndex,
    slabs,
)
from verl_slurm.checkpoint.inspect.contents import Look, flat
from verl_slurm.checkpoint.store.chunks import Wanted
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.runtime_state.format import RUNTIME_STATE_FILE

SUBJECTS = ("position", "schema", "config", "topology", "data", "frozen", "tensors")
# Tensors are read in slabs and groups of so many bytes at most: how large one is, a stranger may have said.
_GROUP_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference, by a dotted key of one of SUBJECTS; None: that side lacks it."""

    subject: str
    key: str
    a: object
    b: object


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared bit for bit, and where it differs."""

    a: str
    b: str
    num_tensors: int
    """In both, of one type and shape."""
    num_bytes: int
    """Of these tensors, or of a guest's files, on one side."""
    differing: tuple[str, ...]
    """Names of what differs or is on one side alone, `domain/name`; empty: all is the same."""
    num_files: int = 0
    """Of a guest's checkpoint, whose files are compared; `differing` then names files."""

    @property
    def same(self) -> bool:
        return not self.differing


def difference(
    a: Path, b: Path, keys_a: Keyring | None = None, keys_b: Keyring | None = None
) -> list[Difference]:
    """Lists every difference of two checkpoint directories, by subject and key; empty if there is none.

    Raises:
        NotFound: one of them is no whole checkpoint.
        CheckpointCorrupt: a file that was read is not what was committed.
        ConfigError: a config.yaml is invalid.
        KeyRefused: one needs a key that is missing.
    """
    left, right = _facts(Look(a, keys_a)), _facts(Look(b, keys_b))
    return [
        Difference(subject=subject, key=key, a=left[subject].get(key), b=right[subject].get(key))
        for subject in SUBJECTS
        for key in _unlike(left[subject], right[subject])
    ]


def compare(a: Path, b: Path, keys_a: Keyring | None = None, keys_b: Keyring | None = None) -> Comparison:
    """Compares two checkpoint directories bit for bit.

    Raises:
        KeyRefused: one needs a key that is missing.
        CheckpointCorrupt: one of them does not verify.
        ConfigError: they come from two kinds of loops.
    """
    require_packages("numpy", wanted_by="comparing tensors")
    left, right = _verified(a, keys_a), _verified(b, keys_b)
    guests = [side.manifest.guest for side in (left, right)]
    if guests[0] != guests[1]:
        raise ConfigError(
            "checkpoints of two kinds of loops cannot be compared",
            where=a,
            found=", ".join("native" if guest is msgspec.UNSET else str(guest) for guest in guests),
            expected="both of one trainer.backend",
        )
    if not left.manifest.domains:
        # Both have just been verified, so equal entries mean equal bytes.
        files = [
            {entry.path: entry for entry in side.manifest.files if _is_state(entry.path)}
            for side in (left, right)
        ]
        num_bytes = sum(entry.size for entry in files[0].values())
        differing = tuple(_unlike(*files))
        return Comparison(
            a=str(a),
            b=str(b),
            num_tensors=0,
            num_bytes=num_bytes,
            differing=differing,
            num_files=len(files[0]),
        )
    domains = [set(side.manifest.domains) for side in (left, right)]
    differing = tuple(f"{domain}/ (only in one)" for domain in sorted(domains[0] ^ domains[1]))
    num_tensors = num_bytes = 0
    for domain in sorted(domains[0] & domains[1]):
        number, size, names = _compare_domain(domain, left, right)
        num_tensors, num_bytes = num_tensors + number, num_bytes + size
        differing += tuple(f"{domain}/{name}" for name in names)
    differing += tuple(_compare_small(left, right))
    return Comparison(a=str(a), b=str(b), num_tensors=num_tensors, num_bytes=num_bytes, differing=differing)


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    # From both sides: a key that one of them lacks is a difference, too.
    return [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]


def _facts(look: Look) -> dict[str, dict[str, object]]:
    """Returns subject → key → value."""
    manifest = look.manifest
    # By class and field, not by id alone: the id tells that layouts differ, and not where.
    schema = parse_schema(look.read(SCHEMA_VERSION), where=look.directory / SCHEMA_VERSION)
    layout, metadata = look.json("orchestration.json"), look.json("metadata.json")
    return {
        "position": {name: getattr(manifest, name) for name in ("step", "safe_point", "phase")}
        | {key: metadata.get(key) for key in ("index", "rollout_offset")},
        "schema": _schema(schema),
        "config": look.config(),
        "topology": {"world_size": manifest.world_size}
        | flat(msgspec.to_builtins(manifest.topology))
        | {key: layout.get(key) for key in ("nodes", "backend")},
        "data": {"fingerprint": manifest.dataset_fingerprint, "root": layout.get("data_root")}
        | _files(layout.get("data_files")),
        "frozen": dict(manifest.frozen),
        "tensors": _tensors(look.indexes()) | _own_files(manifest),
    }


def _tensors(indexes: Mapping[str, TensorIndex | FileEntry]) -> dict[str, object]:
    """Returns type and shape of each tensor; for an index too large to list, its digest."""
    found: dict[str, object] = {}
    for domain, index in indexes.items():
        # Too large to list (`bounded.SHOWN_INDEX`).
        if isinstance(index, FileEntry):
            # The digest still tells whether anything differs.
            found[f"{index.path} of {index.size} bytes"] = index.sha256
            continue
        for name, entry in index.tensors.items():
            found[f"{domain}/{name}"] = f"{entry.dtype} {list(entry.shape)}"
    return found


def _own_files(manifest: Manifest) -> dict[str, object]:
    # Then `_tensors` lists what it holds. The content of a framework's files belongs to that framework.
    if manifest.domains:
        return {}
    # Sizes, not digests: some of these files differ in any two saves.
    return {entry.path: f"{entry.size} bytes" for entry in manifest.files if "/" in entry.path}


def _schema(schema: SchemaVersion) -> dict[str, object]:
    fields = {f"{name}.{field}": kind for name, f in schema.classes.items() for field, kind in f.items()}
    return {"id": schema.schema_id, **fields}


def _files(files: object) -> dict[str, object]:
    return {f"file {name}": digest for name, digest in files.items()} if isinstance(files, dict) else {}


def _verified(directory: Path, keys: Keyring | None) -> CheckpointReader:
    verdict = verify(directory, keys=keys)
    if not verdict.needs_key:  # else the reader says which
        verdict.require(
            "a checkpoint to compare does not verify",
            directory,
            "compare checkpoints that verify (verl-slurm verify DIR)",
        )
    return CheckpointReader(directory, keys)


def _is_state(path: str) -> bool:
    # torch.distributed.checkpoint gives each save a number of its own in `.metadata`.
    return "/" in path and not path.endswith("/.metadata")


def _compare_domain(
    domain: str, left: CheckpointReader, right: CheckpointReader
) -> tuple[int, int, list[str]]:
    """Returns number and bytes of the tensors in both, and the names of those that differ."""
    mine, other = left.index(domain).tensors, right.index(domain).tensors
    kinds = [{name: (e.dtype, e.shape) for name, e in entries.items()} for entries in (mine, other)]
    unlike = _unlike(*kinds)
    names = [f"{name} (only in one)" for name in unlike if name not in mine or name not in other]
    names += [f"{name} (shape or type)" for name in unlike if name in mine and name in other]
    alike = sorted(mine.keys() - set(unlike))
    # Files of one digest at the same places hold the same tensors: nothing is read again.
    if _plain_files(domain, left) != _plain_files(domain, right):
        digests = [
            _digests(side, domain, {name: entries[name] for name in alike})
            for side, entries in ((left, mine), (right, other))
        ]
        names += _unlike(*digests)
    return len(alike), sum(mine[name].num_bytes for name in alike), names


def _plain_files(domain: str, side: CheckpointReader) -> object:
    """Returns what equals another checkpoint's if all bytes of the domain do; of an encrypted one, never."""
    files = [entry for entry in side.manifest.files if entry.path.startswith(f"{domain}/")]
    return files if side.manifest.encryption is msgspec.UNSET else side


def _digests(reader: CheckpointReader, domain: str, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Returns the SHA-256 of each tensor's bytes in C order, whatever boxes it was saved in."""
    digests = {name: hashlib.sha256() for name in entries}
    for group in _groups(entries):
        buffers = [_Buffer(entry) for _, entry in group]
        wanted: dict[str, list[Wanted]] = {}
        for (_, entry), buffer in zip(group, buffers, strict=True):
            for piece in entry.without_runs().pieces:
                if piece.numel:
                    wanted.setdefault(f"{domain}/{piece.file}", []).append(buffer.place(piece))
        if wanted:
            reader.fill(wanted)
        for (name, _), buffer in zip(group, buffers, strict=True):
            digests[name].update(buffer.whole())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _groups(entries: Mapping[str, TensorEntry]) -> Iterator[list[tuple[str, TensorEntry]]]:
    group: list[tuple[str, TensorEntry]] = []
    size = 0
    for name, entry in entries.items():
        for slab in slabs(entry, _GROUP_BYTES):
            if group and size + slab.num_bytes > _GROUP_BYTES:
                yield group
                group, size = [], 0
            group.append((name, slab))
            size += slab.num_bytes
    if group:
        yield group


class _Buffer:
    """Memory of a slab: pieces of whole rows are read to their places, others beside it first."""

    def __init__(self, entry: TensorEntry) -> None:
        self._entry, self._item_bytes = entry, DTYPE_BYTES[entry.dtype]
        self._data = bytearray(entry.num_bytes)
        self._others: list[tuple[Piece, bytearray]] = []

    def place(self, piece: Piece) -> Wanted:
        """Returns where the bytes of a piece with elements go."""
        length = piece.numel * self._item_bytes
        data, at = self._data, 0
        if piece.shape[1:] == self._entry.shape[1:]:
            at = math.prod((piece.offset[:1] or (0,)) + piece.shape[1:]) * self._item_bytes
        else:
            data = bytearray(length)
            self._others.append((piece, data))
        return Wanted(piece.at, length, ctypes.addressof(ctypes.c_char.from_buffer(data)) + at)

    def whole(self) -> bytearray:
        """Returns the slab's bytes, in C order."""
        import numpy as np  # the command line has no memory to spare for it

        kind = f"V{self._item_bytes}"
        for piece, data in self._others:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
            whole = np.frombuffer(self._data, kind).reshape(self._entry.shape)
            whole[box] = np.frombuffer(data, kind).reshape(piece.shape)
        return self._data


def _compare_small(left: CheckpointReader, right: CheckpointReader) -> Iterable[str]:
    """Schedulers and runtime states; yields the names of what differs."""
    # It imports numpy.
    from verl_slurm.runtime_state.codec import facts

    # A loop that is not ours has none: its schedulers are state like all else.
    mine, other = (
        side.read("scheduler.json") if "scheduler.json" in side.entries else None for side in (left, right)
    )
    if mine != other:
        yield "scheduler.json"
    # From both sides: the two may have been saved by different numbers of ranks.
    for name in sorted(filter(RUNTIME_STATE_FILE.fullmatch, left.entries.keys() | right.entries.keys())):
        if not (name in left.entries and name in right.entries):
            yield f"{name} (only in one)"
            continue
        # By digests of its arrays, through a window: a state of some MB may expand to 2 GiB.
        ours, theirs = (
            facts(side.window(name), side.plain_size(name), where=side.directory / name)
            for side in (left, right)
        )
        yield from (f"{name}/{fact}" for fact in _unlike(ours, theirs))
