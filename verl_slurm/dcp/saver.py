"""Live tensors and runtime states of all ranks into one committed checkpoint, while training goes on.

Collective, and in the background: each rank has a thread for it, and the threads talk over a process group of
their own. Order: rank 0 begins and names the staging directory, while every rank copies its tensors → every
rank's saver process writes and hashes the copy, and the thread seals the small files → rank 0 gathers the
entries and commits. Each stage is entered only when every rank has done the one before; where one rank failed,
all raise `RanksFailed` and the staging directory is removed. `checkpoint/format.py` specifies what lies there in
the end.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from verl_slurm.checkpoint import commit as door
from verl_slurm.checkpoint.encryption import CheckpointCipher
from verl_slurm.checkpoint.format import PLAIN_FILES, Encryption, FileEntry, Manifest, Topology
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.dcp.collective import Collective
from verl_slurm.dcp.staging import Staging
from verl_slurm.dcp.tensors import Tensors
from verl_slurm.errors import KeyRefused
from verl_slurm.keys import Keyring, load_keys
from verl_slurm.paths import RunPaths
from verl_slurm.runtime_state.codec import encode
from verl_slurm.runtime_state.format import RuntimeState, runtime_state_name
from verl_slurm.save_path.protocol import Sealing, Written

__all__ = ["CheckpointSaver", "Contents", "Provenance", "SavedCheckpoint"]

_Entries = list[FileEntry]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one rank brings to a save, beside its tensors.

    Attributes:
        runtime: this rank's state. Nobody may change its arrays any more.
        texts: further files by name; those of rank 0 are written, the other ranks' may be empty.
    """

    runtime: RuntimeState
    texts: Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What the manifest says of where a checkpoint comes from; the same for all saves of one incarnation."""

    epoch: int
    parent: str | None
    schema_id: str
    dataset_fingerprint: str
    frozen: Mapping[str, str]
    topology: Topology


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint; `num_bytes` over all ranks, `seconds` from `begin` to the rename."""

    name: str
    seconds: float
    num_bytes: int


class _Begun(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others of a save that begins."""

    directory: str
    sealing: Sealing | None


class CheckpointSaver:
    """Saves the same tensors again and again. Collective; made on the main thread of every rank.

    Args:
        domains: `actor`, `critic`, `optimizer` → the live tensors (`dcp.tensors`), the same names on every rank,
            which stay where they are for as long as this lives.
        epoch_check: raises `Fenced` when this incarnation no longer owns the run; asked by rank 0.
        encryption: where the key is that everything is encrypted and signed with; None: with none.

    Raises:
        KeyRefused, PermissionRefused: `keys.load_keys`.

    Called by: trainer.saving.
    """

    def __init__(
        self,
        paths: RunPaths,
        domains: Mapping[str, Tensors],
        provenance: Provenance,
        ranks: Collective,
        *,
        epoch_check: Callable[[], None],
        encryption: EncryptionConfig | None = None,
    ) -> None:
        self._keys = load_keys(encryption)
        self._paths, self._provenance, self._epoch_check = paths, provenance, epoch_check
        # The main thread talks over `ranks` meanwhile: two conversations on one group would mix.
        self._ranks = ranks.another()
        self._staging = Staging(domains, ranks, encryption=encryption)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    @property
    def arena_bytes(self) -> int:
        """Memory of this rank that saving takes, beside the state itself."""
        return self._staging.num_bytes

    def begin(
        self, contents: Contents, then: Callable[[Collective, "SavedCheckpoint"], None] | None = None
    ) -> "Future[SavedCheckpoint]":
        """Save the state as it is now, at the position that `contents.runtime` names. Returns at once.

        Until `fence` was called, nobody may change the tensors. The save before must be done.

        Args:
            then: done on every rank after the commit, in the background; it may talk to the other ranks'. It
                must not raise.

        Returns:
            The same on every rank, once it is durable. It raises `RanksFailed` on every rank alike when some
            rank failed; nothing is left of the attempt then. Where rank 0 was fenced off, `Fenced` is among
            its `kinds`.
        """
        started = time.monotonic()
        begun: Future[_Begun] = Future()
        written = self._staging.begin(
            lambda: [self._paths.checkpoints / begun.result().directory], lambda: begun.result().sealing
        )
        return self._thread.submit(self._save, contents, started, begun, written, then)

    def fence(self) -> float:
        """Wait until the tensors may be changed; the seconds it took."""
        return self._staging.fence()

    def close(self) -> None:
        """Let a save that is under way come to its end, and give the memory back."""
        self._thread.shutdown()
        self._staging.close()

    def _save(
        self,
        contents: Contents,
        started: float,
        begun: "Future[_Begun]",
        written: "Future[Written]",
        then: Callable[[Collective, "SavedCheckpoint"], None] | None,
    ) -> "SavedCheckpoint":
        staging: door.Staging | None = None

        def first() -> bytes:
            nonlocal staging
            staging = door.begin(self._paths, contents.runtime.step, contents.runtime.safe_point)
            sealing = _sealing(self._keys, staging.final.name)
            return msgspec.msgpack.encode(_Begun(directory=staging.directory.name, sealing=sealing))

        def write() -> _Entries:
            try:
                small = self._write_small(begun.result(), contents)
            finally:
                wait([written])  # whoever cleans up must not do so under a saver that writes
            return [*small, *_require_durable(written.result())]

        def last(entries: _Entries) -> bytes:
            assert staging is not None
            seconds = time.monotonic() - started
            sealing = begun.result().sealing
            manifest = _manifest(
                staging.final.name,
                contents.runtime,
                self._provenance,
                entries,
                seconds,
                sealing.encryption if sealing is not None else msgspec.UNSET,
            )
            final = door.commit(staging, manifest, epoch_check=self._epoch_check, keys=self._keys)
            seconds = time.monotonic() - started
            return msgspec.msgpack.encode(
                SavedCheckpoint(name=final.name, seconds=seconds, num_bytes=manifest.num_bytes)
            )

        try:
            try:
                answer = self._ranks.on_first("starting the save", first)
                begun.set_result(msgspec.msgpack.decode(answer, type=_Begun))
            except BaseException as error:
                begun.set_exception(error)  # the staging thread waits for it
                wait([written])
                raise
            mine = self._ranks.together("writing the checkpoint", write)
            entries = [
                entry
                for part in self._ranks.gather(msgspec.msgpack.encode(mine))
                for entry in msgspec.msgpack.decode(part, type=_Entries)
            ]
            done = msgspec.msgpack.decode(
                self._ranks.on_first("committing the checkpoint", lambda: last(entries)), type=SavedCheckpoint
            )
        except BaseException:
            if staging is not None:
                door.abort(staging)
            raise
        if then is not None:
            then(self._ranks, done)
        return done

    def _write_small(self, begun: _Begun, contents: Contents) -> _Entries:
        """Write, encrypted where a key is configured, and make durable what is not a tensor."""
        directory: Path = self._paths.checkpoints / begun.directory
        cipher = None
        if begun.sealing is not None and self._keys is not None:
            record = begun.sealing.encryption
            key = self._keys.find(record.key_id, where="the key of rank 0")
            cipher = CheckpointCipher(key, begun.sealing.name, record)
        elif (begun.sealing is None) != (self._keys is None):
            raise KeyRefused(
                "the ranks do not agree on whether to encrypt",
                remedy="let every node see the same key (checkpoint.encryption)",
            )
        files = dict(contents.texts) | self._staging.layout.indexes if self._ranks.rank == 0 else {}
        files[runtime_state_name(self._ranks.rank)] = encode(contents.runtime)
        for path, data in files.items():
            (directory / path).parent.mkdir(mode=0o700, exist_ok=True)
            (directory / path).write_bytes(data if cipher is None else cipher.seal(path, data))
        entries = door.seal(directory, sorted(files))
        if cipher is None:
            return entries
        return [
            entry
            if entry.path in PLAIN_FILES
            else msgspec.structs.replace(entry, plain_size=len(files[entry.path]))
            for entry in entries
        ]


def _sealing(keys: Keyring | None, name: str) -> Sealing | None:
    """For a new attempt to save `name`: a new salt."""
    if keys is None:
        return None
    return Sealing(name=name, encryption=CheckpointCipher.begin(keys.current, name).record)


def _require_durable(written: Written) -> _Entries:
    (outcome,) = written.outcomes
    if outcome.error is not None:
        raise OSError(outcome.errno or 0, outcome.error)
    return list(written.files)


def _manifest(
    name: str,
    runtime: RuntimeState,
    provenance: Provenance,
    entries: _Entries,
    seconds: float,
    encryption: Encryption | msgspec.UnsetType,
) -> Manifest:
    return Manifest(
        name=name,
        step=runtime.step,
        safe_point=runtime.safe_point,
        phase=runtime.phase,
        epoch=provenance.epoch,
        parent=provenance.parent,
        schema_id=provenance.schema_id,
        dataset_fingerprint=provenance.dataset_fingerprint,
        world_size=runtime.world_size,
        topology=provenance.topology,
        files=tuple(entries),
        frozen=dict(provenance.frozen),
        created_utc=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        save_seconds=round(seconds, 3),
        encryption=encryption,
    )
