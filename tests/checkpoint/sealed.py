"""Encrypted checkpoints without torch, for the tests of whatever meets one."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.builders import make_manifest, own_run
from verl_slurm.base.keys import Keyring, MasterKey
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.encryption import CheckpointCipher
from verl_slurm.checkpoint.format.specification import PLAIN_FILES
from verl_slurm.checkpoint.format.state_schema import current_schema, render_schema
from verl_slurm.checkpoint.store.commit import StagingDirectory, begin, commit, seal

KEY, OTHER = MasterKey(bytes(range(32))), MasterKey(bytes(range(1, 33)))
KEYS = Keyring(KEY)
PLAIN = {
    "config.yaml": b"name: run\n",
    "metadata.json": b"{}",
    "orchestration.json": b"{}",
    "scheduler.json": b"{}",
    "schema_version.json": render_schema(current_schema()),
    "actor/rank_0000.bin": b"actor weights" * 100,
    "critic/rank_0000.bin": b"critic weights" * 100,
    "optimizer/rank_0000.bin": b"",
    "runtime_state.rank_0000.msgpack.zst": b"a prompt that is nobody's business",
}


def save_sealed(
    paths: RunPaths,
    step: int,
    key: MasterKey | None = KEY,
    *,
    attempt: int = 1,
    fence: Callable[[], None] = lambda: None,
) -> Path:
    """A checkpoint as the saver makes one, encrypted where there is a key."""
    staging: StagingDirectory = begin(paths, step, 0)
    cipher = None if key is None else CheckpointCipher.begin(key, staging.final.name)
    for name, data in PLAIN.items():
        path = staging.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data if cipher is None else cipher.seal(name, data))
    entries = seal(staging.directory, list(PLAIN))
    if cipher is not None:
        entries = [
            entry
            if entry.path in PLAIN_FILES
            else msgspec.structs.replace(entry, plain_size=len(PLAIN[entry.path]))
            for entry in entries
        ]
    record = msgspec.UNSET if cipher is None else cipher.record
    manifest = make_manifest(
        step, **own_run(staging.final), attempt=attempt, files=tuple(entries), encryption=record
    )
    return commit(staging, manifest, attempt_check=fence, keys=None if key is None else Keyring(key))
