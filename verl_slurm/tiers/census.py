"""Surveys every tier's checkpoints for the planner, and remembers what was read back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

import msgspec

from verl_slurm.base.bounded import RECORD, decode_json, read_regular
from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt, SchemaMismatch, VerlSlurmError
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.manifest import parse
from verl_slurm.checkpoint.format.signature import signature_problem
from verl_slurm.checkpoint.format.specification import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config.checks.tiers import LOCAL_TIER
from verl_slurm.config.tiers_section import TierConfig
from verl_slurm.tiers.backend import Backend, ObjectInfo
from verl_slurm.tiers.tier_layout import TierRecord, TierRecords, checkpoint_prefix, parse_key
from verl_slurm.tiers.tier_plan import TierCopy, TierState


@dataclass(frozen=True, kw_only=True)
class OpenTier:
    """A configured tier and its storage.

    Attributes:
        run: this run's `layout.run_prefix` in it.
        backend: None: it could not be opened; `problem` holds the reason.
    """

    config: TierConfig
    run: str
    backend: Backend | None
    problem: str = ""


@dataclass
class Memory:
    """`RUN/control/tiers.json`: read once, written after every change (a few KB)."""

    paths: RunPaths
    records: dict[str, dict[str, TierRecord]] = field(default_factory=dict)

    @classmethod
    def load(cls, paths: RunPaths) -> "Memory":
        """Returns the stored records; none if the file is missing or damaged (it is a memory, not the truth)."""
        try:
            data = read_regular(paths.tier_records, RECORD)
            return cls(paths, dict(decode_json(data, TierRecords, RECORD, doubles=False).tiers))
        # Losing it costs one reading of everything, nothing else.
        except (OSError, *UNREADABLE):
            return cls(paths)

    def get(self, tier: str, name: str) -> TierRecord | None:
        return self.records.get(tier, {}).get(name)

    def set(self, tier: str, name: str, record: TierRecord | None) -> None:
        """Sets or removes a record, durably."""
        if record is None:
            self.records.get(tier, {}).pop(name, None)
        else:
            self.records.setdefault(tier, {})[name] = record
        # Written at once, not at the end of the pass: a mover may be killed after hours of reading.
        private_dir(self.paths.control)
        write_file(self.paths.tier_records, msgspec.json.encode(TierRecords(self.records)) + b"\n")


def local_state(paths: RunPaths, memory: Memory, keys: Keyring | None = None) -> TierState:
    """Surveys tier 0. Its checkpoints count as verified if the mover has read them back, by copying or otherwise.

    Args:
        keys: if given, a checkpoint that is not signed with one of them is refused, whatever is remembered.
    """
    copies = []
    for info in list_checkpoints(paths):
        # Torn ones are the start's to judge, and quarantined ones are no copies.
        if info.kind != "committed":
            continue
        try:
            manifest = read_manifest(info.path)
        except (OSError, VerlSlurmError):
            continue  # pruned since the listing
        # After the manifest was read: if it is exchanged in between, the record does not fit and the checkpoint counts
        # as unread.
        stamp = local_stamp(paths, info.name)
        refused = signature_problem(manifest, keys)
        record = memory.get(LOCAL_TIER, info.name)
        if (
            record is None
            or record.signature == "refused"
            or (record.digest, record.stamp) != (manifest.digest, stamp)
        ):
            record = None
        copies.append(
            TierCopy(
                name=info.name,
                committed=True,
                verified=False if refused else None if record is None else record.ok,
                digest=manifest.digest,
                attempt=manifest.attempt,
                saved=_time(manifest.created_utc),
                num_bytes=manifest.num_bytes,
                refused=bool(refused),
                detail=refused or (record.detail if record else ""),
            )
        )
    return TierState(name=LOCAL_TIER, local=True, copies=tuple(copies))


def local_stamp(paths: RunPaths, name: str) -> str:
    """Returns tier 0's mark of a manifest."""
    try:
        info = (paths.checkpoints / name / MANIFEST).stat()
    except OSError:
        return ""
    # A checkpoint that is saved again comes by a rename, with another inode; times alone may repeat.
    return f"{info.st_ino}.{info.st_mtime_ns}"


def tier_state(tier: OpenTier, memory: Memory, keys: Keyring | None = None) -> TierState:
    """Surveys one tier: a single listing, and the manifests that are not remembered.

    Args:
        keys: if given, a checkpoint that is not signed with one of them is refused.

    Raises:
        TierError: it did not answer.
    """
    assert tier.backend is not None
    found: dict[str, dict[str, ObjectInfo]] = {}
    # One listing for all checkpoints: in a bucket each request has its price and its round trip.
    for info in tier.backend.list(tier.run):
        # What is not of our form belongs to others (`layout.py`, section 1) and is neither counted nor removed.
        if (parsed := parse_key(tier.run, info.key)) is not None:
            name, path = parsed
            found.setdefault(name, {})[path] = info
    copies = tuple(_copy(tier, tier.backend, name, objects, memory, keys) for name, objects in found.items())
    return TierState(name=tier.config.name, keep_days=tier.config.keep_days, copies=copies)


def _copy(
    tier: OpenTier,
    backend: Backend,
    name: str,
    objects: dict[str, ObjectInfo],
    memory: Memory,
    keys: Keyring | None,
) -> TierCopy:
    record_object = objects.get(MANIFEST)
    if record_object is None:
        detail = f"{len(objects)} objects without a manifest"
        return TierCopy(name=name, committed=False, litter=True, detail=detail)
    num_bytes = sum(info.size for info in objects.values())
    record = memory.get(tier.config.name, name)
    # The listing shows that manifest, sizes and number are those of the last reading: no request for the manifest is
    # needed.
    if record is not None and _counts(record, record_object.stamp, num_bytes, len(objects), keys):
        return TierCopy(
            name=name,
            committed=True,
            verified=record.ok,
            digest=record.digest,
            attempt=record.attempt,
            saved=_time(record.created_utc),
            num_bytes=num_bytes,
            detail=record.detail,
        )
    # One byte beyond the limit, so that `parse` refuses a larger one; the server names the size.
    data = backend.read(record_object.key, 0, min(record_object.size, MAX_MANIFEST_BYTES + 1))
    try:
        manifest = parse(data, where=record_object.key)
    except (CheckpointCorrupt, SchemaMismatch) as error:
        # Not litter: another version of this code may read it (`plan.py`, rule 6).
        return TierCopy(name=name, committed=False, detail=error.what)
    problem = _incomplete(manifest, name, objects)
    refused = signature_problem(manifest, keys)
    return TierCopy(
        name=name,
        committed=not problem,
        # Never True here: a listing proves sizes, not bytes.
        verified=False if refused else None,
        refused=bool(refused),
        digest=manifest.digest,
        attempt=manifest.attempt,
        saved=_time(manifest.created_utc),
        num_bytes=num_bytes,
        detail=refused or problem,
    )


def _counts(record: TierRecord, stamp: str, num_bytes: int, num_objects: int, keys: Keyring | None) -> bool:
    """Returns whether a record still matches the object and answers all that is asked now."""
    # A record from before the key was set did not check who made the manifest.
    asked = record.signature == "good" if keys is not None else record.signature != "refused"
    return asked and (record.stamp, record.num_bytes, record.num_objects) == (stamp, num_bytes, num_objects)


def _incomplete(manifest: Manifest, name: str, objects: dict[str, ObjectInfo]) -> str:
    """Returns the first fault that the listing alone shows."""
    if manifest.name != name:
        return f"the manifest is of {manifest.name}"
    for entry in manifest.files:
        info = objects.get(entry.path)
        if info is None:
            return f"{entry.path} is missing"
        if info.size != entry.size:
            return f"{entry.path} has {info.size} bytes, expected {entry.size}"
    return ""


def survey(
    paths: RunPaths, tiers: Sequence[OpenTier], memory: Memory, keys: Keyring | None = None
) -> list[TierState]:
    """Surveys all tiers, tier 0 first. A tier that does not answer is listed as unreachable.

    Args:
        keys: if given, a checkpoint that is not signed with one of them is refused.
    """
    states = [local_state(paths, memory, keys)]
    for tier in tiers:
        problem = tier.problem
        if tier.backend is not None:
            try:
                states.append(tier_state(tier, memory, keys))
                continue
            # One tier's fault is its own: the others are surveyed, and the plan knows that this one may hold anything.
            except VerlSlurmError as error:
                problem = error.one_line()
        states.append(
            TierState(name=tier.config.name, keep_days=tier.config.keep_days, reachable=False, detail=problem)
        )
    return states


def record_of(
    manifest: Manifest,
    backend: Backend,
    run: str,
    *,
    ok: bool,
    now: Callable[[], datetime],
    keys: Keyring | None = None,
    detail: str = "",
) -> TierRecord | None:
    """Returns the record of a checkpoint that was just read back in a tier; None when it is gone.

    Args:
        keys: that its signature was checked with.
    """
    # Listed anew after the reading: the record must describe what the next survey will see.
    objects = {info.key: info for info in backend.list(checkpoint_prefix(run, manifest.name))}
    record_object = objects.get(checkpoint_prefix(run, manifest.name) + MANIFEST)
    if record_object is None:
        return None
    return TierRecord(
        digest=manifest.digest,
        attempt=manifest.attempt,
        created_utc=manifest.created_utc,
        stamp=record_object.stamp,
        # Of everything that is listed, strangers included: another object there makes the record count no longer.
        num_bytes=sum(info.size for info in objects.values()),
        num_objects=len(objects),
        ok=ok,
        checked_utc=now().strftime("%Y-%m-%dT%H:%M:%SZ"),
        detail=detail[:500],
        signature=signature_word(manifest, keys),
    )


def signature_word(manifest: Manifest, keys: Keyring | None) -> Literal["", "good", "refused"]:
    """Returns `TierRecord.signature`."""
    if keys is None:
        return ""
    return "refused" if signature_problem(manifest, keys) else "good"


def _time(text: str) -> datetime | None:
    """Parses a manifest's `created_utc`; None if it is no time with a zone."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    # A time without a zone cannot be compared with the present, and would raise.
    return time if time.tzinfo is not None else None
