"""Specifies a run's checkpoints in a tier; reads, copies, verifies and removes them.

## 1. Names

A tier holds *objects*: a key and bytes (`checkpoint/store/copies.py`). In a bucket they are objects, in a directory
they are files.

```
PREFIX/RUN_NAME-RUN_ID/step_000012/actor/rank_0000.bin     one object for each file of the checkpoint,
PREFIX/RUN_NAME-RUN_ID/step_000012/...                     under the file's own path
PREFIX/RUN_NAME-RUN_ID/step_000012/manifest.json           the commit record, the same bytes as in the run
```

PREFIX is the tier's `prefix`. RUN_NAME is the config's `name`; RUN_ID is the 16 hex digits of `RUN/run_id`, made once
per run, so that two runs of one name never meet. Everything else below PREFIX/RUN_NAME-RUN_ID/ belongs to others and is
neither read nor removed. Keys are matched whole, and every path by the manifest's own rule (`path_problem`), so
`../x` is never a path of ours. Tier 0 is the run itself, with the prefix `checkpoints/`.

## 2. Commit

manifest.json is written LAST, after every object it names has been read back (or its checksum compared, `verify:
checksum`), and only if none is there yet. So a checkpoint without a manifest does not exist in that tier, and one with
a manifest was whole there when it was committed. A mover that dies in between leaves objects without a manifest; the
next pass reads the whole ones back and keeps them, and continues the others (`CopyPlace.put`).

If the run has a key, a manifest that is not signed with it is neither copied into a tier nor out of one, proves nothing
there, and is never removed for that reason. The bytes are those of the run's own directory, encrypted or not.

## 3. Removal

manifest.json FIRST, then the objects. If the mover dies in between, the next pass removes the remains of a checkpoint
that is to go, or completes one that is to stay.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused, TierError
from verl_slurm.base.keys import Keyring
from verl_slurm.base.run_id import RUN_ID
from verl_slurm.checkpoint.format.manifest import checkpoint_order, parse
from verl_slurm.checkpoint.format.signature import authenticate
from verl_slurm.checkpoint.format.specification import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    path_problem,
)
from verl_slurm.checkpoint.store.copies import CopyPlace, ObjectInfo, content_problem, copy_file


def run_prefix(prefix: str, run_name: str, run_id: str) -> str:
    """Returns the prefix of a run's objects in a tier; ends with `/`."""
    assert RUN_ID.fullmatch(run_id), run_id
    return f"{prefix}/{run_name}-{run_id}/"


@dataclass(frozen=True)
class RunCopies:
    """The checkpoints of one run in one place; `prefix` of all its keys there is empty or ends with `/`."""

    place: CopyPlace
    prefix: str

    def below(self, name: str) -> str:
        """Returns the prefix of one checkpoint's objects; ends with `/`."""
        # A prefix of another form would list, and remove, keys that are not a checkpoint's.
        assert checkpoint_order(name) is not None, name
        return f"{self.prefix}{name}/"

    def key(self, name: str, path: str = MANIFEST) -> str:
        """Returns the key of one file of a checkpoint, or of its commit record. Other paths: ValueError."""
        # Paths come from manifests, which others may have written.
        if path != MANIFEST and (problem := path_problem(path)) is not None:
            raise ValueError(f"{problem}: {path!r}")
        return self.below(name) + path

    def objects(self, prefix: str = "") -> dict[str, dict[str, ObjectInfo]]:
        """Lists what is ours by checkpoint and path; of one checkpoint if `prefix` is its `below`."""
        found: dict[str, dict[str, ObjectInfo]] = {}
        # A single listing: in a bucket each request has its price.
        for info in self.place.list(prefix or self.prefix):
            name, _, path = info.key.removeprefix(self.prefix).partition("/")
            ours = info.key.startswith(self.prefix) and checkpoint_order(name) is not None
            # `path_problem` refuses the manifest's own name, which is an object here.
            if ours and (path == MANIFEST or path_problem(path) is None):
                found.setdefault(name, {})[path] = info
        return found

    def manifest(self, name: str, keys: Keyring | None = None) -> tuple[bytes, Manifest]:
        """Returns the bytes of a checkpoint's manifest, and what they say. With keys, it must be signed with
        one.

        Raises:
            CheckpointCorrupt: it is not whole or another checkpoint's, or others made it.
            KeyRefused, SchemaMismatch: it is not signed with a key of ours; it is of another format version.
            TierError: the place did not answer, or has none.
        """
        key = self.key(name)
        info = self.place.stat(key)
        if info is None:
            raise TierError("the checkpoint is not there any more", where=key, found="no manifest")
        # One byte beyond the limit, so that `parse` refuses a larger one; the place names the size.
        data = b"".join(self.place.read(key, 0, min(info.size, MAX_MANIFEST_BYTES + 1)))
        manifest = parse(data, where=key)
        if manifest.name != name:
            raise CheckpointCorrupt("the manifest is another checkpoint's", where=key, found=manifest.name)
        if keys is not None:
            authenticate(manifest, keys, where=key)
        return data, manifest

    def problems(self, name: str, *, expected: bytes | None = None, keys: Keyring | None = None) -> list[str]:
        """Reads back every object of a checkpoint and returns its faults; `expected`: the manifest it should
        have.

        TierError: the place did not answer. SchemaMismatch: the manifest is of another format version.
        """
        try:
            data, manifest = self.manifest(name, keys)
        except (CheckpointCorrupt, KeyRefused) as error:
            return [f"{MANIFEST}: {error.what}: {error.found}"]
        if expected is not None and data != expected:
            return [f"{MANIFEST}: of another checkpoint"]
        found = ((e.path, content_problem(self.place, self.key(name, e.path), e)) for e in manifest.files)
        return [f"{path}: {problem}" for path, problem in found if problem]

    def remove(self, name: str) -> None:
        """Removes a checkpoint: the commit record first, so a death from there on leaves one that does not exist."""
        self.place.delete(self.key(name))
        for objects in self.objects(self.below(name)).values():
            for info in objects.values():
                self.place.delete(info.key)


def copy_checkpoint(
    source: RunCopies,
    target: RunCopies,
    data: bytes,
    manifest: Manifest,
    *,
    beside: Sequence[CopyPlace] = (),
    at_once: int = 1,
    until: float | None = None,
) -> int:
    """Makes a checkpoint whole and verified in `target`; returns the bytes sent. May be killed and called again.

    Memory: for each file at once a block of 4 MiB, or the parts in flight of an upload.

    Args:
        data, manifest: from `source.manifest`, with the run's keys if it has one.
        beside: further places with files of this very checkpoint, by their own paths.
        at_once, until: number of files; as of `copies.copy_file`.

    Raises:
        CheckpointCorrupt: the source does not hold what its manifest says; nothing is committed then.
        TierError: a place failed, or the target returned other bytes twice.
    """
    name, place, record = manifest.name, target.place, target.key(manifest.name)
    # Committed there already? Then it is whole, or mended as one that does not exist.
    if place.stat(record) is not None:
        if not target.problems(name, expected=data):
            return 0
        place.delete(record)

    def copy(entry: FileEntry) -> int:
        # What `source` has damaged, one of the others may have.
        sources = [(source.place, source.key(name, entry.path)), *((other, entry.path) for other in beside)]
        return copy_file(sources, (place, target.key(name, entry.path)), entry, until=until)

    with ThreadPoolExecutor(at_once, thread_name_prefix="copy") as pool:
        copying = [pool.submit(copy, entry) for entry in manifest.files]
        try:
            sent = sum(file.result() for file in copying)
        except BaseException:
            # Thousands of files may wait: those that have not begun are not copied any more.
            pool.shutdown(cancel_futures=True)
            raise
    # An earlier attempt with other files left them: a checkpoint is exactly what its manifest names. Before the commit:
    # from then on the checkpoint is judged by what is listed below it.
    wanted = {MANIFEST, *(entry.path for entry in manifest.files)}
    for path, info in target.objects(target.below(name)).get(name, {}).items():
        if path not in wanted:
            place.delete(info.key)
    # The manifest last: it vouches for everything that was read back above.
    committed = place.commit(record, data)
    stored = b"".join(place.read(record, 0, len(data) + 1))
    # The same bytes there are this copy's own, or another mover's of it.
    if stored != data:
        what = "another process wrote this checkpoint at the same time"
        if committed:
            what = "the tier gives back another manifest than it was given"
            place.delete(record)
        raise TierError(what, where=record, remedy="the next pass looks again")
    return sent
