"""Opens the tiers of a run, surveys their checkpoints for the planner, and remembers what was read back.

`RUN/control/tiers.json` holds what was read back in which tier: `TierRecord` by tier and name. It is a memory of work
done, never the truth: a record counts only while the tier's manifest is unchanged (`stamp`). A tier that has none of
the checkpoints that were good there counts as one that does not answer. Losing the file costs one reading of
everything, and that.
"""

import fcntl
import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from verl_slurm.base.bounded import RECORD, decode_json, read_regular
from verl_slurm.base.errors import (
    UNREADABLE,
    CheckpointCorrupt,
    ConfigError,
    SchemaMismatch,
    TierAway,
    TierError,
    VerlSlurmError,
)
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.keys import Keyring
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.packages import install_command
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import RUN_ID, run_id
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.format.signature import signature_problem
from verl_slurm.checkpoint.format.specification import MANIFEST, Manifest
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.copies import CopyPlace, DirectoryPlace, ObjectInfo
from verl_slurm.checkpoint.tiers.run_copies import RunCopies, run_prefix
from verl_slurm.checkpoint.tiers.tier_plan import TierCopy, TierState
from verl_slurm.config.checks.tiers import LOCAL_TIER, is_s3
from verl_slurm.config.schema import RunConfig, TierConfig

ENTRY_POINTS = "verl_slurm.tiers"
_Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class OpenTier:
    """A tier and what this run has in it; without `copies` it could not be opened, and `problem` holds the reason."""

    config: TierConfig
    copies: RunCopies | None
    problem: str = ""


def open_place(tier: TierConfig) -> CopyPlace:
    """Returns the storage of `tier`, unconnected. ConfigError: no such plug-in. ImportError: no boto3."""
    if tier.kind.startswith("plugin:"):
        name = tier.kind.partition(":")[2]
        found = list(entry_points(group=ENTRY_POINTS, name=name))
        if len(found) != 1:
            known = sorted(entry_points(group=ENTRY_POINTS).names)
            raise ConfigError(
                "no such tier plug-in" if not found else "two tier plug-ins of that name",
                where=f"tiers: {tier.name}",
                found=name,
                expected=", ".join(known) or f"an installed package with an entry point in {ENTRY_POINTS}",
                remedy="install the plug-in's package where the daemon runs",
            )
        place: CopyPlace = found[0].load()(tier)
        return place
    if is_s3(tier):
        # boto3 is an extra: without a bucket it is not imported.
        from verl_slurm.checkpoint.tiers.s3 import S3Place

        return S3Place(tier)
    assert tier.path is not None, "config.tier_checks"
    return DirectoryPlace(Path(tier.path).resolve(), f"tier {tier.name}")


def open_run(paths: RunPaths) -> OpenTier:
    """Returns tier 0: the run itself. The plan neither copies nor removes anything there."""
    copies = RunCopies(DirectoryPlace(paths.root, "the run"), f"{paths.checkpoints.name}/")
    return OpenTier(config=TierConfig(name=LOCAL_TIER, kind="posix"), copies=copies)


def open_tiers(paths: RunPaths, config: RunConfig) -> list[OpenTier]:
    """Opens the configured tiers, nearest first. One that cannot be opened is included, with the reason."""
    # Before `run_id`, which makes the file: a run without tiers needs none.
    if not config.tiers:
        return []
    number = run_id(paths)
    tiers = []
    for tier in config.tiers:
        copies, problem = None, ""
        try:
            copies = RunCopies(open_place(tier), run_prefix(tier.prefix, config.name, number))
        # Listed with its problem: what it holds counts as unknown, not as gone.
        except VerlSlurmError as error:
            problem = error.one_line()
        except ImportError as error:
            problem = f"{error.name} is not installed: {install_command('s3')}"
        tiers.append(OpenTier(config=tier, copies=copies, problem=problem))
    return tiers


def namesakes(config: RunConfig) -> dict[str, Path]:
    """Returns, by tier that is a directory, the newest whole checkpoint of another run of the same name."""
    # Of a run whose RUN and id are gone, as far as the run that begins can know.
    found = {}
    for tier in config.tiers:
        if tier.path is None:
            continue
        runs = Path(tier.path, tier.prefix).glob(f"{glob.escape(config.name)}-*")
        steps = [
            (order, step.parent)
            for run in runs
            if RUN_ID.fullmatch(run.name.removeprefix(f"{config.name}-"))
            for step in run.glob(f"step_*/{MANIFEST}")
            if (order := checkpoint_order(step.parent.name)) is not None
        ]
        if steps:
            found[tier.name] = max(steps)[1]
    return found


@contextmanager
def mover_lock(paths: RunPaths) -> Iterator[None]:
    """Ensures one mover per run, by a lock that ends with its process. TierError: another one is at work."""
    private_dir(paths.control, inside=paths.run)
    # O_CLOEXEC: a child that inherited the descriptor would hold the lock after our end.
    fd = os.open(paths.tier_lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            # It saves work, and safety does not rest on it: if a file system does not share locks between nodes, two
            # movers write the same bytes under the same keys.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TierError(
                "another mover of this run is at work",
                where=paths.tier_lock,
                remedy=f"wait for it; verl-slurm tiers {shell_word(paths.root)}",
            ) from None
        except OSError:
            pass  # a file system without locks, as Lustre without `-o flock`
        yield
    finally:
        # The file stays: removing it would let two movers lock two files of one name.
        os.close(fd)


class TierRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one checkpoint in one tier.

    Attributes:
        digest, stamp: of its manifest; another stamp means another manifest.
        num_bytes, num_objects: as the tier listed them, manifest included.
        ok: every byte was read back and matched, at `checked_utc`; false: `detail` has the fault.
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


class _Records(msgspec.Struct, frozen=True):
    tiers: dict[str, dict[str, TierRecord]] = {}


class Memory:
    """`RUN/control/tiers.json`: read once, written after every change.

    With `keys`, a checkpoint that is not signed with one of them is refused, whatever is remembered.
    """

    def __init__(self, paths: RunPaths, keys: Keyring | None = None) -> None:
        self._paths, self._keys = paths, keys
        self.records: dict[str, dict[str, TierRecord]] = {}
        try:
            data = read_regular(paths.tier_records, RECORD)
            self.records = dict(decode_json(data, _Records, RECORD, doubles=False).tiers)
        # Losing it costs one reading of everything, nothing else.
        except (OSError, *UNREADABLE):
            pass

    def get(self, tier: str, name: str) -> TierRecord | None:
        return self.records.get(tier, {}).get(name)

    def note(self, tier: OpenTier, name: str, manifest: Manifest | None, problem: str, now: datetime) -> None:
        """Records, durably, what a reading of every byte of a checkpoint came to; without a manifest: nothing."""
        assert tier.copies is not None
        # Listed anew after the reading: the record must describe what the next survey will see.
        objects = tier.copies.objects(tier.copies.below(name)).get(name, {})
        self.records.setdefault(tier.config.name, {}).pop(name, None)
        if manifest is not None and MANIFEST in objects:
            signature: Literal["", "good", "refused"] = "good" if self._keys is not None else ""
            self.records[tier.config.name][name] = TierRecord(
                digest=manifest.digest,
                attempt=manifest.attempt,
                created_utc=manifest.created_utc,
                stamp=objects[MANIFEST].stamp,
                num_bytes=sum(info.size for info in objects.values()),
                num_objects=len(objects),
                ok=not problem,
                checked_utc=now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                detail=problem[:500],
                signature="refused" if signature_problem(manifest, self._keys) else signature,
            )
        # Written at once, not at the end of the pass: a mover may be killed after hours of reading.
        private_dir(self._paths.control, inside=self._paths.run)
        write_file(self._paths.tier_records, msgspec.json.encode(_Records(self.records)) + b"\n")

    def survey(self, tiers: Sequence[OpenTier]) -> list[TierState]:
        """Surveys all tiers, tier 0 first. A tier that does not answer is listed as unreachable."""
        states = []
        for tier in (open_run(self._paths), *tiers):
            problem, copies = tier.problem, tuple[TierCopy, ...]()
            if tier.copies is not None:
                try:
                    found = tuple(self._copies(tier, tier.copies))
                    self._require_known(tier, tier.copies, found)
                    copies = found
                # One tier's fault is its own: the others are surveyed, and the plan knows that this one may hold
                # anything.
                except (VerlSlurmError, OSError) as error:
                    problem = error.one_line() if isinstance(error, VerlSlurmError) else str(error)
            states.append(
                TierState(
                    name=tier.config.name,
                    keep_days=tier.config.keep_days,
                    reachable=not problem,
                    local=tier.config.name == LOCAL_TIER,
                    copies=copies,
                    detail=problem,
                )
            )
        return states

    def _require_known(self, tier: OpenTier, copies: RunCopies, found: Sequence[TierCopy]) -> None:
        """Raises TierAway: the tier has nothing of what was good there, as a mount point without its file system."""
        # By name: the last of them leaves no tier (`tier_plan.py`, rule 1), and what an upload left is no sign of it.
        had = {name for name, record in self.records.get(tier.config.name, {}).items() if record.ok}
        if tier.config.name != LOCAL_TIER and had and not had & {copy.name for copy in found}:
            offload = f"verl-slurm tiers {shell_word(self._paths.root)} --offload"
            raise TierAway(
                "it is empty: its file system is not mounted, or it was emptied",
                where=tier.config.path or copies.prefix,
                expected=max(had, key=lambda name: checkpoint_order(name) or (-1, -1)),
                remedy="mount it; or, if it was emptied: "
                f"rm {shell_word(self._paths.tier_records)} && {offload}",
            )

    def _copies(self, tier: OpenTier, copies: RunCopies) -> Iterator[TierCopy]:
        if tier.config.name != LOCAL_TIER:
            for name, objects in copies.objects().items():
                yield self._copy(tier, copies, name, objects)
            return
        for info in list_checkpoints(self._paths):
            # Torn ones are the start's to judge, and quarantined and partial ones are no copies.
            if info.kind != "committed":
                continue
            try:
                objects = copies.objects(copies.below(info.name)).get(info.name, {})
                copy = self._copy(tier, copies, info.name, objects)
            except TierError:
                continue  # pruned since the listing
            if not copy.litter:
                yield copy

    def _copy(self, tier: OpenTier, copies: RunCopies, name: str, objects: dict[str, ObjectInfo]) -> TierCopy:
        record_object = objects.get(MANIFEST)
        if record_object is None:
            detail = f"{len(objects)} objects without a manifest"
            return TierCopy(name=name, committed=False, litter=True, detail=detail)
        num_bytes = sum(info.size for info in objects.values())
        record = self.get(tier.config.name, name)
        # The listing shows that manifest, sizes and number are those of the last reading: no request for the manifest
        # is needed.
        if record is not None and self._counts(record, record_object.stamp, num_bytes, len(objects)):
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
        try:
            _, manifest = copies.manifest(name)
        except (CheckpointCorrupt, SchemaMismatch) as error:
            # Not litter: another version of this code may read it (`tier_plan.py`, rule 6).
            return TierCopy(name=name, committed=False, detail=error.what)
        problem, refused = _incomplete(manifest, objects), signature_problem(manifest, self._keys)
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

    def _counts(self, record: TierRecord, stamp: str, num_bytes: int, num_objects: int) -> bool:
        """Returns whether a record still matches the objects and answers all that is asked now."""
        # A record from before the key was set did not check who made the manifest.
        asked = record.signature == "good" if self._keys is not None else record.signature != "refused"
        return asked and (record.stamp, record.num_bytes, record.num_objects) == (
            stamp,
            num_bytes,
            num_objects,
        )


def _incomplete(manifest: Manifest, objects: dict[str, ObjectInfo]) -> str:
    for entry in manifest.files:
        info = objects.get(entry.path)
        if info is None:
            return f"{entry.path} is missing"
        if info.size != entry.size:
            return f"{entry.path} has {info.size} bytes, expected {entry.size}"
    return ""


def _time(text: str) -> datetime | None:
    """Parses a manifest's `created_utc`; None if it is no time with a zone."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    # A time without a zone cannot be compared with the present, and would raise.
    return time if time.tzinfo is not None else None
