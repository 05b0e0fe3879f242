"""Brings a checkpoint from a tier back into the run: staged, every byte checked, read back from the medium, renamed.

It is used by hand (`verl-slurm tiers --fetch-back`), and by a start that finds no checkpoint of its own that verifies.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from verl_slurm.base.errors import (
    CheckpointCorrupt,
    KeyRefused,
    NoRoom,
    NotFound,
    TierAway,
    TierError,
    VerlSlurmError,
)
from verl_slurm.base.files import fsync_path, private_dir, rename, write_file, write_new
from verl_slurm.base.keys import Keyring, load_keys
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.storage import need_of_next
from verl_slurm.checkpoint.format.info import Verdict
from verl_slurm.checkpoint.format.manifest import checkpoint_order, parse
from verl_slurm.checkpoint.format.signature import authenticate
from verl_slurm.checkpoint.format.specification import MANIFEST, FileEntry, Manifest
from verl_slurm.checkpoint.store.medium import room_for
from verl_slurm.checkpoint.store.quarantine import fill, move_to_quarantine, set_aside_copies
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import TierFailed, TierFetched
from verl_slurm.journal.files import append_event
from verl_slurm.tiers.backend import Backend
from verl_slurm.tiers.census import Memory, OpenTier, survey
from verl_slurm.tiers.opening import open_tiers
from verl_slurm.tiers.tier_digest import ContentCheck
from verl_slurm.tiers.tier_layout import object_key
from verl_slurm.tiers.tier_plan import TierState, newest_first
from verl_slurm.tiers.transfer import TierOrigin

_FILES_AT_ONCE = 4
_FETCH_S, _BYTES_PER_S = 600.0, 4 << 20
"""Seconds that a start waits for a checkpoint, plus the time for its bytes at this rate. A slower tier is given up."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Result of a fetch.

    Attributes:
        name: None: no tier has anything.
        tier: its source; empty: it was in the run already, whole.
    """

    name: str | None
    tier: str = ""
    reasons: tuple[str, ...]


def fetch(
    paths: RunPaths, config: RunConfig, name: str, *, tiers: Sequence[OpenTier] | None = None
) -> Fetched:
    """Brings checkpoint `name` into the run's own directory, from the nearest tier that has it whole.

    An existing copy that verifies stays; a damaged one is set aside first. If the run has a key, both must be signed
    with it.

    Raises:
        NotFound: no tier that answers has it.
        CheckpointCorrupt: none of those that have it returns what its manifest says.
        TierError: they stopped answering.
        KeyRefused: it is not signed with a key of the run; and PermissionRefused: `keys.load_keys`.
    """
    # The name becomes a path and a key.
    if checkpoint_order(name) is None:
        raise NotFound("not a checkpoint's name", where=name, expected="e.g. step_000012")
    opened = open_tiers(paths, config) if tiers is None else tiers
    keys = load_keys(config.checkpoint.encryption)
    states = survey(paths, opened, Memory.load(paths), keys)
    tier = _fetch(paths, opened, states, name, keys)
    return Fetched(name=name, tier=tier, reasons=(_brought(name, tier),))


def fetch_newest(
    paths: RunPaths,
    config: RunConfig,
    *,
    only: str = "",
    tiers: Sequence[OpenTier] | None = None,
    on_limit: Callable[[float], None] = lambda seconds: None,
) -> Fetched:
    """Brings the newest checkpoint that any tier has whole; an older one if the newest does not verify.

    Args:
        only: this checkpoint and no other.
        on_limit: called before each checkpoint with the seconds that fetching and verifying it may take.

    Raises:
        TierAway: nothing was found, but a tier that once had a checkpoint of this run does not answer: starting from
            nothing would throw that checkpoint away.
        TierError: there are checkpoints, and none can be used.
    """
    keys = load_keys(config.checkpoint.encryption)
    opened = open_tiers(paths, config) if tiers is None else tiers
    memory = Memory.load(paths)
    states = survey(paths, opened, memory, keys)
    away = [state for state in states if not state.reachable]
    reasons = [f"tier {state.name} does not answer: {state.detail}" for state in away]
    refused = [
        f"{copy.name} in tier {s.name}: {copy.detail}"
        for s in states[1:]
        for copy in s.copies
        if copy.refused
    ]
    reasons += refused
    # Without tier 0: the caller found nothing there that verifies.
    names, failure = [name for name in newest_first(states[1:]) if only in ("", name)], TierError
    for name in names:
        # Twice the time of a fetch: what has arrived is read back from the disk as well.
        claimed = max(copy.num_bytes for state in states[1:] for copy in state.copies if copy.name == name)
        on_limit(2 * (_FETCH_S + claimed / _BYTES_PER_S))
        try:
            tier = _fetch(paths, opened, states, name, keys)
        except VerlSlurmError as error:
            # An older one that verifies is better than none.
            reasons.append(f"{name}: {error.one_line()}")
            if isinstance(error, TierError):  # it has stopped answering, and has given back nothing wrong
                failure = TierAway
            continue
        reasons.append(_brought(name, tier))
        return Fetched(name=name, tier=tier, reasons=tuple(reasons))
    for state in away:
        # A tier that never had a checkpoint of this run, as at a first start, does not stop it.
        records = memory.records.get(state.name, {})
        known = [name for name, record in records.items() if record.ok and only in ("", name)]
        if known:
            raise TierAway(
                f"{only or 'no checkpoint'} is {'not' if only else 'left'} in the run, and a tier that has "
                f"{'it' if only else 'some'} does not answer",
                where=f"tier {state.name}",
                found=state.detail,
                expected=max(known, key=lambda n: checkpoint_order(n) or (-1, -1)),
                remedy="start again when it answers; checkpoint.resume_from="
                f"{'NAME goes on from an older one' if only else 'null begins afresh'}",
            )
    # There were checkpoints: to begin afresh is the user's decision.
    if names or refused:
        raise failure(
            "no checkpoint is left in the run, and none in a tier could be fetched",
            found=reasons[-1],
            remedy="look at the tiers; checkpoint.resume_from=null begins afresh",
        )
    return Fetched(name=None, reasons=(*reasons, "no tier has a checkpoint of this run"))


def _brought(name: str, tier: str) -> str:
    return f"{name} was fetched from tier {tier} and verifies" if tier else f"{name} is there and verifies"


def _fetch(
    paths: RunPaths,
    tiers: Sequence[OpenTier],
    states: Sequence[TierState],
    name: str,
    keys: Keyring | None,
) -> str:
    """Returns the tier that it came from; empty when it was there."""
    final = paths.checkpoints / name
    if os.path.lexists(final) and _require_judged(final, keys).ok:
        return ""
    # From the nearest tier on.
    by_name = {tier.config.name: tier for tier in tiers}
    failure: VerlSlurmError | None = None
    for state in states[1:]:
        if not any(copy.name == name and copy.usable for copy in state.copies):
            continue
        tier = by_name[state.name]
        assert tier.backend is not None
        try:
            num_bytes = _bring(paths, tier.backend, tier.run, name, keys)
        except (VerlSlurmError, OSError) as error:
            failure = error if isinstance(error, VerlSlurmError) else _failed(final, error)
            # The next tier may have it whole.
            append_event(paths, TierFailed(state.name, name, "fetch", failure.one_line()))
            continue
        append_event(paths, TierFetched(name, state.name, num_bytes))
        return state.name
    # The last tier's failure says more than "nobody has it": some tier listed it.
    if failure is not None:
        raise failure
    refused = [(s, copy) for s in states[1:] for copy in s.copies if copy.name == name and copy.refused]
    if refused:
        raise KeyRefused(
            "no tier has this checkpoint signed with our key",
            where=f"{name} in tier {refused[0][0].name}",
            found=refused[0][1].detail,
            remedy="name its key in checkpoint.encryption.old_key_files, or its digest in accept_unsigned",
        )
    raise NotFound(
        "no tier that answers has this checkpoint whole",
        where=name,
        remedy=f"verl-slurm tiers {shell_word(paths.root)}",
    )


def _require_judged(final: Path, keys: Keyring | None) -> Verdict:
    """Returns the verdict on the run's own copy: it verifies, or is damaged beyond doubt and may be replaced.

    Raises:
        KeyRefused, CheckpointCorrupt: neither.
    """
    verdict = verify(final, keys=keys)
    # Not damage: with the right key it may be good.
    if verdict.needs_key:
        raise KeyRefused(
            "the run's own copy was not made with our key, and is left where it is",
            where=final,
            found=verdict.one_line(),
            remedy="name its key in checkpoint.encryption.old_key_files, or move it away by hand",
        )
    # Storage that fails now, or an owner who is not us, is no reason to replace it.
    if not verdict.ok and not verdict.damaged:
        raise CheckpointCorrupt(
            "the run's own copy cannot be judged, and is left where it is",
            where=final,
            found=verdict.one_line(),
            remedy="look at its owner and its storage",
        )
    return verdict


def _failed(where: Path, error: OSError) -> TierError:
    return TierError("the checkpoint could not be written here", where=where, found=error.strerror or error)


def _bring(paths: RunPaths, backend: Backend, run: str, name: str, keys: Keyring | None) -> int:
    """Fetches into staging, verifies there (with keys, the signature too) and renames; returns the bytes."""
    # The manifest first: all that follows is checked against it.
    data = TierOrigin(backend, run, name).manifest()
    manifest = parse(data, where=f"{name}/{MANIFEST}")
    if manifest.name != name:
        raise CheckpointCorrupt("the manifest is another checkpoint's", where=name, found=manifest.name)
    if keys is not None:  # before a terabyte arrives that may not be used
        authenticate(manifest, keys, where=f"{name}/{MANIFEST}")
    private_dir(paths.checkpoints)
    final = paths.checkpoints / name
    _require_room(paths.checkpoints, manifest)
    # For all files together: a tier that is slow in each of thousands would pass a limit for one.
    deadline = time.monotonic() + _FETCH_S + manifest.num_bytes / _BYTES_PER_S
    # Damaged copies of our own with this very manifest: what the tier has lost of a file, one of them may still have.
    copies = set_aside_copies(paths, name, data)

    def bring(entry: FileEntry) -> None:
        try:
            _bring_file(backend, run, name, entry, inner, deadline)
        except CheckpointCorrupt:
            if not fill(inner, [entry], copies):  # the tier's copy and ours may be whole together
                raise

    # Inside the staging directory it has its own name already, so that `verify` can judge it before the rename.
    outer = paths.staging(final, secrets.token_hex(8))
    inner = outer / name
    inner.mkdir(mode=0o700, parents=True)
    outer.chmod(0o700)
    try:
        # Sorted: a folder comes before those in it.
        for folder in sorted({p for entry in manifest.files for p in _folders(entry.path)}):
            (inner / folder).mkdir(mode=0o700)
        with ThreadPoolExecutor(max_workers=_FILES_AT_ONCE, thread_name_prefix="fetch") as pool:
            bringing = [pool.submit(bring, entry) for entry in manifest.files]
            try:
                for file in bringing:
                    file.result()
            except BaseException:
                # Thousands of files may wait: those that have not begun are not fetched any more.
                pool.shutdown(cancel_futures=True)
                raise
        # The bytes as they came, not rendered anew: the mover compares them with those in the tiers.
        write_file(inner / MANIFEST, data)
        for folder in sorted({p for entry in manifest.files for p in _folders(entry.path)}, reverse=True):
            # Deepest first: the names in a directory are durable before its own.
            fsync_path(inner / folder)
        fsync_path(inner)
        # Read back from the medium, although each byte was checked on its way: this copy is resumed from next.
        verify(inner, keys=keys).require("what was fetched does not verify", inner)
        if os.path.lexists(final):
            there = _require_judged(final, keys)
            if there.ok:  # the run saved it while we fetched
                return manifest.num_bytes
            move_to_quarantine(final, [str(problem) for problem in there.problems])
        rename(inner, final)
    finally:
        # After the rename it is an empty shell.
        shutil.rmtree(outer, ignore_errors=True)
    return manifest.num_bytes


def _require_room(folder: Path, manifest: Manifest) -> None:
    """Requires room for it.

    Raises:
        NoRoom: the checkpoint does not fit.
    """
    # A manifest may claim any size: without a key nothing proves that it is ours.
    need = need_of_next(manifest.num_bytes, len(manifest.files), basis="what its manifest claims", margin=0.0)
    room = room_for(folder, need)
    if room.enough is False:
        raise NoRoom(
            "no room for a checkpoint from a tier",
            where=folder / manifest.name,
            found=room.reason,
            remedy="make room, or name another checkpoint to fetch back",
        )


def _bring_file(
    backend: Backend, run: str, name: str, entry: FileEntry, inner: Path, deadline: float
) -> None:
    check = ContentCheck(entry)
    key = object_key(run, name, entry.path)

    def blocks() -> Iterator[bytes]:
        for block in backend.blocks(key):
            if check.update(block):  # a server that never stops must not fill the disk
                return
            # Between two blocks: a backend bounds each of its own reads.
            if time.monotonic() > deadline:
                raise TierError("the tier is too slow", where=key, found=f"below {_BYTES_PER_S >> 20} MiB/s")
            yield block

    write_new(inner / entry.path, blocks())
    problem = check.problem()
    if problem:
        raise CheckpointCorrupt("the tier gave back other bytes", where=key, found=problem)


def _folders(path: str) -> list[str]:
    return [path[:at] for at, char in enumerate(path) if char == "/"]
