"""Specifies a checkpoint on disk, for everything that writes or reads one.

## 1. Tree

```
RUN/checkpoints/                      0700
  step_000012/                        after 12 whole steps
  step_000012_sp0007/                 7 safe points into the step after those
    manifest.json                     the commit record (section 2)
    schema_version.json               `state_schema.SchemaVersion`: signatures of the state classes
    metadata.json                     step, learning rates, metric history, time: for people
    config.yaml                       the resolved configuration
    orchestration.json                data files, device groups, topology: as at the first start
    actor/ critic/ optimizer/         tensors: `index.json` and one `rank_NNNN.bin` a rank (tensor_index.py);
                                      no critic/ where the manifest's `trained` does not name it (GRPO)
    scheduler.json                    learning-rate schedulers
    chat_template.jinja               what rendered the prompts; not there if all of them were text
    runtime_state.rank_0000.msgpack.zst   one a rank: `runtime_state/format.py`
  .step_000012.<nonce>.tmp/           being written, or being removed; never read
  latest                              the name of the newest commit; a hint, never the truth
  quarantine/NAME.<nonce>/            set aside because it did not verify, with NAME.<nonce>.reason.json
  quarantine/strays.NAME.<nonce>/     what lay in it and is not in its manifest, with its reason in the same way
```

What a guest saved, a training loop that is not ours (the manifest's `guest`), has of these manifest.json,
schema_version.json, metadata.json and config.yaml, and is of a whole step. Besides, one that our own saver wrote, for
`verl_slurm.run`:

```
  step_000007/
    guest/                            tensors that all ranks have alike, and those that they share: `index.json` and
                                      `rank_NNNN.bin`, as actor/
    guest/own/                        tensors that a rank has for itself, by `NNNN/NAME`; the same
    runtime_state.rank_0000.msgpack.zst   one a rank, with the rest of its state as a tree (`loops/loop_state.py`)
```

and one that a framework wrote itself, a directory with its files as they are:

```
  step_000007/
    global_step_7/...                 guest: verl; beside it latest_checkpointed_iteration.txt, so that verl's own tools
                                      take step_000007 for a default_local_dir
    guest/...                         guest: loop (Hugging Face's Trainer, Lightning)
```

The latter is never encrypted: the framework alone could decrypt it.

RUN/partial/checkpoints/ is the same for partial checkpoints, whose manifest names the tensor domains they hold
(`components`); no other directory of tensors is in them, and nothing is resumed from them.

RUN/resharded/checkpoints/ is the same for copies of a checkpoint of verl for another number of ranks: a start makes
one, and its ranks read it in the place of the checkpoint of that name. metadata.json has `resharded`: the source's
number of ranks, the digest of its manifest, and that of all tensors put together.

Directories are 0700, files 0600, all of the user who runs the job. Order: (step, safe point).

## 2. manifest.json

JSON, UTF-8, at most MAX_MANIFEST_BYTES, the `Manifest` struct: no key twice or unknown, no NaN or Infinity.
`files` names every regular file of the tree except manifest.json, sorted by path, with size and SHA-256; for a
file of more than one chunk that is the digest of its chunks' digests, which follow it (`chunks.py`).
`digest` is the SHA-256 (hex) of the canonical JSON of the other fields: keys sorted, separators `,` and `:`,
ASCII with \\u escapes, numbers as Python's `json` writes them. Layout and key order of the file are free.

`run_id` ties it to its run. In `RUN/checkpoints` one of another run counts as damaged (`verify`) and as foreign
(`catalog.list_checkpoints`), unless RUN/control/adopted has its digest: `checkpoint.resume_from` named it.

`metrics` are the numbers of the step that the checkpoint ends, finite ones only; not there in one from the middle of
a step. They are never encrypted: a list of checkpoints shows which is the best, without a key.

A field that is added, or a value of a closed one, raises FORMAT_VERSION: code of another version refuses what it does
not know, and without another version it would take the checkpoint for a damaged one and set it aside.

Where a key is set, `encryption` says how the files are sealed (`encryption.py`), and `hmac` signs what
`digest` is of (`signature.py`); elsewhere neither is there.

A plain digest finds accidents, not attackers: a process that can write the directory can write the manifest. So a
checkpoint that is to be loaded must belong to us, and no other user may write it (`verify`).

## 3. A path in a manifest

Relative, `/` between names, at most MAX_PATH_CHARS characters and MAX_DEPTH names of `[A-Za-z0-9_.=+@-]`,
none of them `.` or `..`; not `manifest.json`; no two that differ only in case.

## 4. Commit order

1. rank 0 makes the staging directory (`commit.begin`); every rank writes its files into it
2. every rank fsyncs, sizes and hashes its own files, and fsyncs their directories (`commit.seal`)
3. rank 0 checks that the tree is exactly what was sealed, writes manifest.json last, fsyncs it and its folder
4. rank 0 asks whether its attempt still owns the run, renames to the final name, fsyncs the parent
5. the `latest` hint is replaced

A directory without a manifest that verifies does not exist for resume. Before step 4 a crash leaves a staging
directory, which `commit.sweep` removes at the next start; after it, a whole checkpoint.

## 5. Who may remove

`pruning.apply_prune` removes what a plan names, renamed to a staging name first. `commit.abort` and `sweep` remove
staging directories. `recover` moves to quarantine and removes nothing.
"""

import re
from typing import Annotated, Literal

import msgspec

from verl_slurm.base import bounded

FORMAT_VERSION = 5
CHUNK_BYTES = 4 << 20
MANIFEST = "manifest.json"
SCHEMA_VERSION = "schema_version.json"
CHAT_TEMPLATE = "chat_template.jinja"

REQUIRED_FILES = ("config.yaml", "metadata.json", "orchestration.json", "scheduler.json", SCHEMA_VERSION)
REQUIRED_DIRECTORIES = ("actor", "critic", "optimizer")
"""Required unless the checkpoint says otherwise (`Manifest.trained`, `Manifest.components`)."""

GUEST_FILES = ("config.yaml", "metadata.json", SCHEMA_VERSION)
"""Files of a checkpoint that a guest saved; its own directory lies beside them."""

GUEST_DOMAINS = ("guest", "guest/own")
"""Tensors of a guest that our own saver wrote (section 1)."""

Guest = Literal["verl", "loop"]
"""The loop that saved it: one of verl's trainers, or one that called `verl_slurm.run`."""

Algorithm = Literal["ppo", "grpo"]
"""`train.algorithm` of the run that saved it."""

# A staging directory, as RunPaths.staging names it.
# The leading dot: no reader takes a half-written directory for a checkpoint, whose name begins with `step_`.
STAGING_NAME = re.compile(r"\.(step_\d{6,18}(?:_sp\d{4,18})?)\.([0-9a-f]{8,})\.tmp", re.ASCII)

# 100 000 files of 200 bytes of JSON each are 20 MB; the leaves of 1 TB of tensors are 17 MB.
MAX_FILES = 100_000
MAX_MANIFEST_BYTES = bounded.MANIFEST.num_bytes
MAX_PATH_CHARS = 1024
MAX_DEPTH = 8

PLAIN_FILES = frozenset({SCHEMA_VERSION})
"""Never encrypted: read before anything else, and holds nothing but names of fields."""
# As CHUNK_BYTES, so that a chunk is sealed, hashed, written and read in one pass; a tag is that of AES-GCM.
SEALED_CHUNK_BYTES: Literal[4194304] = 4194304
TAG_BYTES = 16

# No escape in JSON is needed for these, which `manifest.signed_bytes` relies on. 255 is what Linux allows a name.
_COMPONENT = re.compile(r"[A-Za-z0-9_.=+@\-]{1,255}")

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Metrics = Annotated[
    dict[Annotated[str, msgspec.Meta(min_length=1, max_length=128)], float],
    msgspec.Meta(min_length=1, max_length=256),
]
_Roles = Annotated[tuple[Literal["actor", "critic"], ...], msgspec.Meta(min_length=1, max_length=2)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]
# `\Z`: `$` would let a newline follow.
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes one file of a checkpoint."""

    path: str
    """Relative to the checkpoint's directory (section 3)."""
    size: _Count
    """Bytes on disk."""
    sha256: _Sha256
    """SHA-256 of the content, or of the leaves if there are any."""
    leaves: tuple[_Sha256, ...] = ()
    """SHA-256 of each chunk of CHUNK_BYTES, the last one shorter, for a file of several chunks."""
    plain_size: _Count | msgspec.UnsetType = msgspec.UNSET
    """Bytes before encryption, of an encrypted file."""


class Encryption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes how the files are sealed (`encryption.py`)."""

    cipher: Literal["AES-256-GCM"] = "AES-256-GCM"
    chunk_bytes: Literal[4194304] = SEALED_CHUNK_BYTES
    key_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    salt: _Sha256


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes the arrangement of the ranks that wrote it."""

    dp: _Positive
    tp: _Positive = 1
    pp: _Positive = 1


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The commit record (section 2)."""

    format_version: int = FORMAT_VERSION
    name: _Text
    step: _Count
    """Whole steps done."""
    safe_point: _Count
    """Safe points passed since the end of the last whole step."""
    phase: Literal["generate", "score", "advantage", "update", "evaluate", "step_end"]
    run_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    """`RUN/run_id` of the run that saved it."""
    attempt: _Count
    """The attempt that wrote it."""
    parent: _Text | None
    """Name of the checkpoint that its attempt resumed from."""
    schema_id: _Text
    dataset_fingerprint: _Text
    world_size: _Positive
    topology: Topology
    files: Annotated[tuple[FileEntry, ...], msgspec.Meta(max_length=MAX_FILES)]
    components: tuple[Literal["actor", "critic", "optimizer"], ...] = ()
    """Tensor domains of a partial checkpoint: nothing is resumed from it. Empty: all of them."""
    trained: _Roles | msgspec.UnsetType = msgspec.UNSET
    """The models that its run trains. Absent: actor and critic."""
    algorithm: Algorithm | msgspec.UnsetType = msgspec.UNSET
    """The algorithm that its run trains with. Absent: a guest's."""
    frozen: Annotated[dict[_Text, _Text], msgspec.Meta(max_length=64)] = {}
    """Digest of each model that does not train (reference, reward), by role."""
    created_utc: _Text
    """ISO 8601 with Z."""
    save_seconds: float
    """Seconds until the first medium had all of it."""
    guest: Guest | msgspec.UnsetType = msgspec.UNSET
    """The loop that saved it, if it was a guest: `files` then names that loop's own files (section 1)."""
    metrics: _Metrics | msgspec.UnsetType = msgspec.UNSET
    """Reward, losses and other numbers of the step it ends (`best.metrics_of`)."""
    encryption: Encryption | msgspec.UnsetType = msgspec.UNSET
    digest: _Text = ""
    hmac: _Text | msgspec.UnsetType = msgspec.UNSET

    @property
    def roles(self) -> tuple[Literal["actor", "critic"], ...]:
        """Returns the models that its run trains."""
        return ("actor", "critic") if isinstance(self.trained, msgspec.UnsetType) else self.trained

    @property
    def domains(self) -> tuple[str, ...]:
        """Returns the directories of tensors that it must have; files of a framework are not looked into."""
        if self.guest is not msgspec.UNSET:
            ours = any(entry.path == f"{GUEST_DOMAINS[0]}/index.json" for entry in self.files)
            return GUEST_DOMAINS if ours else ()
        # Partial ones name theirs; a full one has what its run trains.
        return self.components or (*self.roles, "optimizer")

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.files)


def path_problem(path: str) -> str | None:
    """Returns why `path` may not stand in a manifest (section 3), or None."""
    if not path or len(path) > MAX_PATH_CHARS:
        return "empty or too long a path"
    names = path.split("/")
    # `tree.list_tree` enters no directory below that: a deeper file could not be found again.
    if len(names) > MAX_DEPTH:
        return "too deep a path"
    for name in names:
        # Before the pattern, which both match.
        if name in {".", ".."}:
            return "a path with . or .."
        if not _COMPONENT.fullmatch(name):
            return "a path with an empty name or characters outside [A-Za-z0-9_.=+@-]"
    # It is written last, with everybody's digests in it: it cannot hold its own.
    if path == MANIFEST:
        return "the manifest names itself"
    return None


def sealed_chunks(plain_size: int) -> int:
    """Returns the number of encrypted chunks of a file of `plain_size` bytes; an empty file has one."""
    return max(1, -(-plain_size // SEALED_CHUNK_BYTES))


def sealed_size(plain_size: int) -> int:
    """Returns the bytes on disk of a file of `plain_size` bytes, encrypted."""
    return plain_size + TAG_BYTES * sealed_chunks(plain_size)


def guest_directory(guest: Guest, step: int) -> str:
    """Names the directory of a guest's own files in a checkpoint."""
    return f"global_step_{step}" if guest == "verl" else GUEST_DOMAINS[0]


def missing_parts(manifest: Manifest) -> list[str]:
    """Lists the required parts that this manifest does not name."""
    paths = {entry.path for entry in manifest.files}
    tops = {path.split("/", 1)[0] for path in paths if "/" in path}
    # One for each rank: a checkpoint that lacks a rank's state is not whole.
    states = (f"runtime_state.rank_{rank:04d}.msgpack.zst" for rank in range(manifest.world_size))
    if not isinstance(manifest.guest, msgspec.UnsetType):
        # A framework's files are its own: required is that its directory has any.
        own = guest_directory(manifest.guest, manifest.step)
        missing = [
            name for name in (*GUEST_FILES, *(states if manifest.domains else ())) if name not in paths
        ]
        return missing if own in tops else [*missing, f"{own}/"]
    wanted = [*REQUIRED_FILES, *states]
    return [name for name in wanted if name not in paths] + [
        f"{name}/" for name in manifest.domains if name not in tops
    ]
