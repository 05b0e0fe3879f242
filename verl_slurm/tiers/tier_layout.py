"""Specifies a checkpoint in a tier, for everything that writes or reads one.

## 1. Names

A tier holds *objects*: a key and bytes. In a bucket they are objects, in a directory they are files.

```
PREFIX/RUN_NAME-RUN_ID/step_000012/actor/rank_0000.bin     one object for each file of the checkpoint,
PREFIX/RUN_NAME-RUN_ID/step_000012/...                     under the file's own path
PREFIX/RUN_NAME-RUN_ID/step_000012/manifest.json           the commit record, the same bytes as in the run
```

PREFIX is the tier's `prefix`. RUN_NAME is the config's `name`; RUN_ID is the 16 hex digits of `RUN/run_id`, made once
per run, so that two runs of one name never meet. Everything else below PREFIX/RUN_NAME-RUN_ID/ belongs to others and is
neither read nor removed. Keys are matched whole, and every path by the manifest's own rule (`format.path_problem`), so
`../x` is never a path of ours.

## 2. Commit

manifest.json is written LAST, after every object it names has been read back (or its checksum compared, `verify:
checksum`), and only if none is there yet (S3: `If-None-Match: *`). So:

- if the run has a key, a manifest that is not signed with it (`checkpoint/format/signature.py`) is neither copied into
  a tier nor out of one, proves nothing there, and is never removed for that reason;
- a checkpoint without a manifest does not exist in that tier;
- one with a manifest was whole and verified in that tier when it was committed;
- a mover that dies in between leaves objects without a manifest. The next pass continues there: whole objects are read
  back and kept, S3 uploads continue after the last part that the server itself lists, files continue after their last
  byte.

The bytes are those of the run's own directory: a checkpoint that is encrypted there is encrypted here.

## 3. Removal

manifest.json FIRST, then the objects. A mover that dies in between leaves a checkpoint that does not exist. The next
pass removes its remains if it is to go, or completes it if it is to stay.

## 4. What is remembered

`RUN/control/tiers.json` holds what was read back in which tier: `TierRecord` by tier and name. It is a memory of work
done, never the truth: a record counts only while the tier's manifest is unchanged (`stamp`), and losing the file
costs one reading of everything, nothing else.

## 5. Plug-ins

`kind: plugin:NAME` is the entry point NAME of the group `verl_slurm.tiers`, a callable `TierConfig -> Backend`
(`backend.Backend` says what it must promise; `tests/tiers/test_backends.py` holds it to that).
"""

from typing import Annotated, Literal

import msgspec

from verl_slurm.base.run_id import RUN_ID
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.format.specification import MANIFEST, path_problem

_Count = Annotated[int, msgspec.Meta(ge=0)]


class TierRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one checkpoint in one tier.

    Attributes:
        digest: of its manifest.
        stamp: the tier's own mark of the manifest object; another one means another manifest.
        num_bytes, num_objects: as the tier listed them, manifest included.
        ok: every byte was read back and matched; false: some did not.
        checked_utc: time of that check. ISO 8601.
        detail: the fault.
        signature: result of a check with keys; empty: it was not checked. If the run has a key, `good` alone counts as
            a memory. `refused` counts for nothing: `accept_unsigned`, or an old key, may admit it tomorrow.
    """

    digest: str
    attempt: _Count
    created_utc: str
    stamp: str
    num_bytes: _Count
    num_objects: _Count
    ok: bool
    checked_utc: str
    detail: str = ""
    signature: Literal["", "good", "refused"] = ""


class TierRecords(msgspec.Struct, frozen=True):
    """`RUN/control/tiers.json`."""

    tiers: dict[str, dict[str, TierRecord]] = {}


def run_prefix(prefix: str, run_name: str, run_id: str) -> str:
    """Returns the prefix of a run's objects in a tier; ends with `/`."""
    assert RUN_ID.fullmatch(run_id), run_id
    return f"{prefix}/{run_name}-{run_id}/"


def checkpoint_prefix(run: str, name: str) -> str:
    """Returns the prefix of one checkpoint's objects; ends with `/`. `run` is a `run_prefix`."""
    # A prefix of another form would list, and remove, keys that are not a checkpoint's.
    assert checkpoint_order(name) is not None, name
    return f"{run}{name}/"


def object_key(run: str, name: str, path: str) -> str:
    """Returns the key of one file of a checkpoint.

    Raises:
        ValueError: no manifest may name that path.
    """
    # Paths come from manifests, which others may have written.
    problem = path_problem(path)
    if problem is not None:
        raise ValueError(f"{problem}: {path!r}")
    return checkpoint_prefix(run, name) + path


def manifest_key(run: str, name: str) -> str:
    """Returns the key of the commit record."""
    return checkpoint_prefix(run, name) + MANIFEST


def parse_key(run: str, key: str) -> tuple[str, str] | None:
    """Splits a key below `run` into (checkpoint's name, path in it); None when it is not of our form."""
    if not key.startswith(run):
        return None
    name, slash, path = key.removeprefix(run).partition("/")
    if not slash or checkpoint_order(name) is None:
        return None
    # `path_problem` refuses the manifest's own name, which is an object here.
    if path != MANIFEST and path_problem(path) is not None:
        return None
    return name, path
