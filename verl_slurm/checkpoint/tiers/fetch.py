"""Brings a checkpoint from a tier back into the run: staged, every byte checked, read back from the medium, renamed.

It is used by hand (`verl-slurm tiers --fetch-back`), and by a start that finds no checkpoint of its own that verifies.
"""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from verl_slurm.base.errors import (
    CheckpointCorrupt,
    KeyRefused,
    NoRoom,
    NotFound,
    TierAway,
    TierError,
    VerlSlurmError,
)
from verl_slurm.base.files import private_dir, rename
from verl_slurm.base.keys import Keyring, load_keys
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import is_adopted, known_run_id, other_run
from verl_slurm.checkpoint.decide.storage import need_of_next
from verl_slurm.checkpoint.format.info import Verdict
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.format.specification import missing_parts
from verl_slurm.checkpoint.store.copies import DirectoryPlace
from verl_slurm.checkpoint.store.lost import parts_since
from verl_slurm.checkpoint.store.medium import room_for
from verl_slurm.checkpoint.store.quarantine import move_strays, move_to_quarantine, set_aside_copies
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.checkpoint.tiers.run_copies import RunCopies, copy_checkpoint
from verl_slurm.checkpoint.tiers.survey import Memory, OpenTier, open_tiers
from verl_slurm.checkpoint.tiers.tier_plan import TierCopy, TierState, newest_first
from verl_slurm.config.checks.tiers import LOCAL_TIER
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import (
    ForceResume,
    Saved,
    Started,
    TierCopied,
    TierFailed,
    TierFetched,
    TierRemoved,
    Verified,
)
from verl_slurm.journal.files import append_event, read_events

_FILES_AT_ONCE = 4
# Seconds that a start waits for a checkpoint, plus the time for its bytes at this rate. A slower tier is given up.
_FETCH_S, _BYTES_PER_S = 600.0, 4 << 20


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Result of a fetch. Without a name no tier has anything; with an empty `tier` it was in the run already, whole."""

    name: str | None
    tier: str = ""
    reasons: tuple[str, ...]


def fetch(
    paths: RunPaths, config: RunConfig, name: str, *, tiers: Sequence[OpenTier] | None = None
) -> Fetched:
    """Brings checkpoint `name` into the run's own directory, from the nearest tier that has it whole.

    An existing copy that verifies stays; a damaged one is set aside first.

    Raises:
        NotFound: no tier that answers has it.
        CheckpointCorrupt: none of those that have it returns what its manifest says.
        NoRoom: it does not fit here.
        TierError: they stopped answering.
        KeyRefused: it is not signed with a key of the run; and PermissionRefused: `keys.load_keys`.
    """
    # The name becomes a path and a key.
    if checkpoint_order(name) is None:
        raise NotFound("not a checkpoint's name", where=name, expected="e.g. step_000012")
    opened = open_tiers(paths, config) if tiers is None else tiers
    keys = load_keys(config.checkpoint.encryption)
    states = Memory(paths, keys).survey(opened)
    tier = _fetch(paths, opened, states, name, keys)
    return Fetched(name=name, tier=tier, reasons=(_brought(name, tier),))


def fetch_newest(
    paths: RunPaths,
    config: RunConfig,
    *,
    only: str = "",
    above: str = "",
    tiers: Sequence[OpenTier] | None = None,
    on_limit: Callable[[float], None] = lambda seconds: None,
) -> Fetched:
    """Brings the newest checkpoint that any tier has whole; an older one if the newest does not verify.

    Args:
        only: this checkpoint and no other.
        above: the run's own newest: of others, what is newer, and `untold`, alone.
        on_limit: called before each checkpoint with the seconds that fetching and verifying it may take.

    Raises:
        TierAway: nothing was found, but a tier that once had a checkpoint of this run does not answer; or the newest
            does not fit here.
        TierError: there are checkpoints, and none can be used.
    """
    keys = load_keys(config.checkpoint.encryption)
    opened = open_tiers(paths, config) if tiers is None else tiers
    memory = Memory(paths, keys)
    states = memory.survey(opened)
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
    names, failure, look = newest_first(states[1:]), TierError, "look at the tiers"
    if wanted := {only, *(untold(paths, states, above) if above else ())} if only or above else set():
        names = [name for name in names if name in wanted]
    needed = bool(only or not above)  # without it the run loses what it had
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
            # Nor is this damage: others free room, and nothing older is used in its place.
            if isinstance(error, NoRoom):
                failure, look = TierAway, "make room here"
                break
            continue
        reasons.append(_brought(name, tier))
        return Fetched(name=name, tier=tier, reasons=tuple(reasons))
    if needed:
        _require_answer(paths, memory, away, only)
    # There were checkpoints: to begin afresh is the user's decision.
    if names or (refused and needed):
        what, way = "no checkpoint is left in the run, and none in a tier", "begins afresh"
        if above:
            what, way = f"a tier has what the run lacks after {above}, and none of it", "goes on without it"
        raise failure(
            f"{what} could be fetched",
            found=reasons[-1],
            remedy=f"{look}; checkpoint.resume_from={above or 'null'} {way}",
        )
    return Fetched(name=None, reasons=(*reasons, "no tier has a checkpoint of this run"))


def _require_answer(paths: RunPaths, memory: Memory, away: Sequence[TierState], only: str) -> None:
    """Raises TierAway if one of the tiers that are away has had a checkpoint of this run, or `only` this one."""
    for state in away:
        # To start from nothing would throw its checkpoints away. One that never had any, as at a first start, does not
        # stop it.
        known = [name for name in _held(paths, memory, state.name) if only in ("", name)]
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


def untold(paths: RunPaths, states: Sequence[TierState], present: str) -> list[str]:
    """Lists, newest first, what is newer than `present` in the tiers and was never told of in the run's journal.

    Then RUN was put back to a former copy of itself. What the user left on purpose is not among it.
    """
    # By name, the attempts that saved it; None: any. A tier's copy that was read back there tells nothing of RUN.
    told: dict[str, set[int | None]] = {}
    since, left, fetched = parts_since(paths), "", (-1, -1)
    for event in read_events(paths):
        match event:
            case Saved(name=name) | Verified(name=name):
                told.setdefault(name, set()).add(event.attempt)
            case TierCopied(name=name, source=source) if source == LOCAL_TIER:
                told.setdefault(name, {None})
            case TierFetched(name=name):  # and those before it, which the run then skips
                fetched = max(fetched, checkpoint_order(name) or fetched)
            case Started(attempt=attempt) if since and attempt == since:
                left = event.time
            case ForceResume(lost=lost) if lost:
                left = event.time
    lowest = max(checkpoint_order(present) or fetched, fetched)

    def is_unknown(copy: TierCopy) -> bool:
        known = told.get(copy.name, set()) & {copy.attempt, None} or is_adopted(paths, copy.digest)
        # By the clock, too: an attempt of the lost history may bear the number of one that came after it.
        abandoned = copy.attempt < since or (
            left and copy.saved and copy.saved <= datetime.fromisoformat(left)
        )
        return copy.usable and (checkpoint_order(copy.name) or lowest) > lowest and not (known or abandoned)

    names = {copy.name for state in states[1:] for copy in state.copies if is_unknown(copy)}
    return [name for name in newest_first(states[1:]) if name in names]


def newer_in_tiers(paths: RunPaths, config: RunConfig, present: str) -> tuple[str, str]:
    """Returns what a start would bring home in place of `present` (`untold`), and from which tier; else two `""`."""
    # As `survey.namesakes`: a bucket is asked by the start alone.
    tiers = tuple(tier for tier in config.tiers if tier.path is not None)
    if not tiers or not known_run_id(paths):
        return "", ""
    memory = Memory(paths, load_keys(config.checkpoint.encryption))
    states = memory.survey(open_tiers(paths, msgspec.structs.replace(config, tiers=tiers)))
    for name in untold(paths, states, present):
        return name, next(s.name for s in states[1:] if any(c.name == name and c.usable for c in s.copies))
    return "", ""


def _held(paths: RunPaths, memory: Memory, tier: str) -> set[str]:
    """Returns what is in a tier by the records and, of what they do not name, by the journal: either may be lost."""
    held = set[str]()
    for event in read_events(paths):
        match event:
            case TierCopied(name=name, tier=where) if where == tier:
                held.add(name)
            case TierRemoved(name=name, tier=where) if where == tier:
                held.discard(name)
    records = memory.records.get(tier, {})
    return (held - records.keys()) | {name for name, record in records.items() if record.ok}


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
    if os.path.lexists(final) and _require_judged(final, keys).is_whole:
        return ""
    # From the nearest tier on.
    by_name = {tier.config.name: tier for tier in tiers}
    failure: VerlSlurmError | None = None
    for state in states[1:]:
        if not any(copy.name == name and copy.usable for copy in state.copies):
            continue
        copies = by_name[state.name].copies
        assert copies is not None
        try:
            num_bytes = _bring(paths, copies, name, keys)
        except (VerlSlurmError, OSError) as error:
            failure = _failed(final, error)
            # The next tier may have it whole. Where the disk is full, the journal takes no line either.
            with suppress(OSError):
                append_event(paths, TierFailed(state.name, name, "fetch", failure.one_line()))
            continue
        with suppress(OSError):  # it is here, and verifies
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
    """Returns the verdict on the run's own copy: whole, or damaged. Else KeyRefused or CheckpointCorrupt."""
    verdict = verify(final, keys=keys)
    if verdict.has_strays:
        move_strays(final, verdict)
    # Not damage: with the right key it may be good.
    if verdict.needs_key:
        raise KeyRefused(
            "the run's own copy was not made with our key, and is left where it is",
            where=final,
            found=verdict.one_line(),
            remedy="name its key in checkpoint.encryption.old_key_files, or move it away by hand",
        )
    # Storage that fails now, or an owner who is not us, is no reason to replace it.
    if not verdict.is_whole and not verdict.damaged:
        raise CheckpointCorrupt(
            "the run's own copy cannot be judged, and is left where it is",
            where=final,
            found=verdict.one_line(),
            remedy=f"if it is yours: chmod -R go-w {shell_word(final)}"
            if verdict.is_open
            else "look at its owner and its storage",
        )
    return verdict


def _failed(where: Path, error: VerlSlurmError | OSError) -> VerlSlurmError:
    """Returns NoRoom for a disk that is full, which is ours: what is read needs no room. Else the tier's own error."""
    cause = error.__cause__ if isinstance(error, TierError) else error
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_room(where, cause.strerror)
    if isinstance(error, VerlSlurmError):
        return error
    return TierError("the checkpoint could not be written here", where=where, found=error.strerror or error)


def _no_room(where: Path, found: str | None) -> NoRoom:
    return NoRoom(
        "no room for a checkpoint from a tier",
        where=where,
        found=found,
        remedy="make room, or name another checkpoint to fetch back",
    )


def _bring(paths: RunPaths, copies: RunCopies, name: str, keys: Keyring | None) -> int:
    """Fetches into staging, every byte checked and read back, and renames; returns the bytes."""
    # The manifest first, and authenticated before a terabyte arrives that may not be used: all that follows is checked
    # against it.
    data, manifest = copies.manifest(name, keys)
    if other := other_run(paths, manifest.run_id, manifest.digest):
        raise CheckpointCorrupt("the tier's copy is not this run's", where=name, found=other)
    if missing := missing_parts(manifest):
        raise CheckpointCorrupt("a required part is not in the manifest", where=name, found=missing[0])
    private_dir(paths.checkpoints, inside=paths.run)
    final = paths.checkpoints / name
    # A manifest may claim any size: without a key nothing proves that it is ours.
    need = need_of_next(manifest.num_bytes, len(manifest.files), basis="what its manifest claims", margin=0.0)
    room = room_for(paths.checkpoints, need)
    if room.enough is False:
        raise _no_room(final, room.reason)
    # Inside the staging directory it has its own name already.
    outer = private_dir(paths.staging(final, secrets.token_hex(8)), inside=paths.run)
    try:
        copy_checkpoint(
            copies,
            RunCopies(DirectoryPlace(outer, "the run"), ""),
            data,
            manifest,
            # Damaged copies of our own with this very manifest: what the tier has lost of a file, one may still have.
            beside=[DirectoryPlace(copy, "the quarantine") for copy in set_aside_copies(paths, name, data)],
            at_once=_FILES_AT_ONCE,
            # For all files together: a tier that is slow in each of thousands would pass a limit for one.
            until=time.monotonic() + _FETCH_S + manifest.num_bytes / _BYTES_PER_S,
        )
        if os.path.lexists(final):
            there = _require_judged(final, keys)
            if there.is_whole:  # the run saved it while we fetched
                return manifest.num_bytes
            move_to_quarantine(final, [str(problem) for problem in there.problems])
        rename(outer / name, final)
    finally:
        # After the rename it is an empty shell.
        shutil.rmtree(outer, ignore_errors=True)
    return manifest.num_bytes
