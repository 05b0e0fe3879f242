"""Runs one pass over all tiers: looks, plans, carries out the plan. May be killed at any point and run again.

Copies come first, nearest tier and newest checkpoint first. Then come removals, each after its witnesses were read back
once more (every byte, from that tier). A failure is recorded and does not stop the rest. If the run has a key, no
checkpoint without its signature is copied, or counts as a witness for a removal.

Each result is an event in the journal, which the daemon writes, too: one line is one O_APPEND write.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil

from verl_slurm.base.errors import (
    CheckpointCorrupt,
    KeyRefused,
    PermissionRefused,
    SchemaMismatch,
    TierError,
    VerlSlurmError,
)
from verl_slurm.base.keys import Keyring, load_keys
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.tiers.run_copies import RunCopies, copy_checkpoint
from verl_slurm.checkpoint.tiers.survey import Memory, OpenTier, mover_lock, open_run, open_tiers
from verl_slurm.checkpoint.tiers.tier_plan import Action, TierState, plan_tiers
from verl_slurm.config.changes import require_in_place
from verl_slurm.config.checks.tiers import LOCAL_TIER
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import TierCopied, TierFailed, TierRemoved, TierUnreachable
from verl_slurm.journal.files import append_event


@dataclass(frozen=True, kw_only=True)
class ActionResult:
    """Result of one action. `problem` is empty when it was carried out."""

    action: Action
    problem: str = ""
    sent: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The survey, plan and results; `unchecked`: why a look checked no signature though the run has a key."""

    states: tuple[TierState, ...]
    plan: tuple[Action, ...]
    done: tuple[ActionResult, ...] = ()
    unchecked: str = ""

    @property
    def ok(self) -> bool:
        """Returns whether every tier was reached and every action carried out."""
        return all(state.reachable for state in self.states) and not any(d.problem for d in self.done)


def _now() -> datetime:
    return datetime.now(UTC)


def lower_priority() -> None:
    """Lowers the process's priority for processor and disk: training comes first."""
    os.nice(19)
    # Best effort 7 and not idle: on a busy disk the idle class may never get anything.
    try:
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    except (psutil.Error, OSError):
        return


def look(paths: RunPaths, config: RunConfig, *, now: Callable[[], datetime] = _now) -> Pass:
    """Returns the very plan that `sync` would carry out now. Changes nothing in any tier.

    If the run's key cannot be read, as on a login node, `Pass.unchecked` tells so, and `sync` would refuse.
    """
    keys, unchecked = None, ""
    try:
        keys = load_keys(config.checkpoint.encryption)
    except (KeyRefused, PermissionRefused) as error:
        unchecked = f"{error.what}: {error.where}"
    states = Memory(paths, keys).survey(open_tiers(paths, config))
    return Pass(states=tuple(states), plan=tuple(plan_tiers(states, now())), unchecked=unchecked)


def sync(
    paths: RunPaths,
    config: RunConfig,
    *,
    dry_run: bool = False,
    now: Callable[[], datetime] = _now,
    tiers: Sequence[OpenTier] | None = None,
) -> Pass:
    """Runs one pass; `dry_run`: plans it alone (`look`).

    Raises:
        ConfigError: the directory is a copy, or was moved.
        TierError: another mover of this run is at work.
        KeyRefused, PermissionRefused: `keys.load_keys`.
    """
    if tiers is None:
        # A copy has the original's run id, and so the original's keys in every tier: it would replace and drop those
        # objects.
        require_in_place(paths.root, config, "offload")
    if dry_run:
        return look(paths, config, now=now)
    keys = load_keys(config.checkpoint.encryption)
    # The survey is made under the lock: a plan of what another mover changes meanwhile would be wrong.
    with mover_lock(paths):
        opened = open_tiers(paths, config) if tiers is None else tiers
        return _Mover(paths, opened, now, keys).run()


class _Mover:
    def __init__(
        self,
        paths: RunPaths,
        tiers: Sequence[OpenTier],
        now: Callable[[], datetime],
        keys: Keyring | None,
    ) -> None:
        self._paths, self._now, self._memory, self._keys = paths, now, Memory(paths, keys), keys
        self._further = tiers
        self._tiers = {tier.config.name: tier for tier in (open_run(paths), *tiers)}
        self._witnesses: dict[tuple[str, str], list[str]] = {}

    def run(self) -> Pass:
        states = self._memory.survey(self._further)
        for state in states:
            if not state.reachable:
                append_event(self._paths, TierUnreachable(state.name, state.detail))
        for copy in states[0].copies:
            # What is not whole is no source: without a word nobody would know why it goes nowhere.
            if copy.refused or (copy.digest and not copy.committed):
                with suppress(CheckpointCorrupt, SchemaMismatch, TierError):  # pruned since the survey
                    self._say_refused(copy.name, copy.detail)
        plan = plan_tiers(states, self._now())
        # Copies before removals: a pass that is killed leaves too much rather than too little.
        done = [self._do(action, self._copy) for action in plan if action.kind == "copy"]
        done += [self._do(action, self._remove) for action in plan if action.kind == "drop"]
        for state in states[1:]:
            if state.reachable:
                self._forget(state.name, plan)
        return Pass(states=tuple(states), plan=tuple(plan), done=tuple(done))

    def _do(self, action: Action, act: Callable[[Action], int]) -> ActionResult:
        began = time.monotonic()
        try:
            sent = act(action)
        # One checkpoint that fails, or one tier that goes away, does not keep the others from being copied.
        except (VerlSlurmError, OSError) as error:
            problem = error.one_line() if isinstance(error, VerlSlurmError) else f"{error}"
            append_event(
                self._paths, TierFailed(action.tier, action.name, action.kind, problem, action.reason)
            )
            return ActionResult(action=action, problem=problem, seconds=time.monotonic() - began)
        seconds = time.monotonic() - began
        if action.kind == "copy":
            told = (action.reason, action.source, sent, round(seconds, 3))
            append_event(self._paths, TierCopied(action.name, action.tier, *told))
        else:
            append_event(self._paths, TierRemoved(action.name, action.tier, action.reason))
        return ActionResult(action=action, sent=sent, seconds=seconds)

    def _copy(self, action: Action) -> int:
        name, target = action.name, self._copies(action.tier)
        if action.source == action.tier:
            # The result is remembered by now, so the next pass plans to mend it.
            self._require_whole(action.tier, name, "does not verify there")
            return 0
        if action.replace:
            self._require_whole(action.source, name, "its successor does not verify")  # or both would be lost
            # The commit record first: objects of two checkpoints under one manifest must never count.
            target.place.delete(target.key(name))
            target.place.forget(target.below(name))  # uploads of the other one
        source = self._copies(action.source)
        try:
            data, manifest = source.manifest(name, self._keys)
            sent = copy_checkpoint(source, target, data, manifest)
        except CheckpointCorrupt:
            # Read back and remembered, so that the next pass takes another source instead of the same bytes again.
            self._read_back(action.source, name)
            raise
        self._memory.note(self._tiers[action.tier], name, manifest, "", self._now())
        # Every byte was read and hashed on its way, so the source's copy is verified. With files that were there
        # already it was not.
        if sent == manifest.num_bytes:
            self._memory.note(self._tiers[action.source], name, manifest, "", self._now())
        return sent

    def _require_whole(self, tier: str, name: str, what: str) -> None:
        if problems := self._read_back(tier, name):
            raise TierError(what, where=f"{tier}: {name}", found=problems[0])

    def _say_refused(self, name: str, detail: str) -> None:
        tier = self._tiers[LOCAL_TIER]
        info = self._copies(LOCAL_TIER).place.stat(self._copies(LOCAL_TIER).key(name))
        # Once and not in every pass. The stamp changes with the manifest: another checkpoint of that name is reported.
        record = self._memory.get(LOCAL_TIER, name)
        if info is None or (record is not None and (record.detail, record.stamp) == (detail, info.stamp)):
            return
        append_event(self._paths, TierFailed(LOCAL_TIER, name, "copy", detail))
        self._memory.note(tier, name, self._copies(LOCAL_TIER).manifest(name)[1], detail, self._now())

    def _read_back(self, tier: str, name: str) -> list[str]:
        """Reads every byte of a checkpoint in a tier, and records the result."""
        copies = self._copies(tier)
        problems = copies.problems(name, keys=self._keys)
        try:
            manifest = copies.manifest(name)[1]
        except (CheckpointCorrupt, SchemaMismatch):
            manifest = None  # there is nothing that a record could be compared with
        self._memory.note(self._tiers[tier], name, manifest, problems[0] if problems else "", self._now())
        return problems

    def _remove(self, action: Action) -> int:
        for witness in action.witnesses:
            if witness not in self._witnesses:
                # Once in a pass: one witness often stands in for several removals.
                self._witnesses[witness] = self._read_back(*witness)
            # A plan may be hours old when its last removal comes: what it relied upon may have changed since.
            if self._witnesses[witness]:
                raise TierError(
                    "kept: what was to stand in for it no longer verifies",
                    where=f"{witness[0]}: {witness[1]}",
                    found=self._witnesses[witness][0],
                    remedy="the next pass mends it where it can",
                )
        self._copies(action.tier).remove(action.name)
        self._memory.note(self._tiers[action.tier], action.name, None, "", self._now())
        return 0

    def _forget(self, tier: str, plan: Sequence[Action]) -> None:
        """Abandons uploads of checkpoints that no pass copies any more."""
        # Parts of an upload cost money until it is aborted. Those that this pass has not finished are continued.
        copies = self._copies(tier)
        wanted = [copies.below(a.name) for a in plan if a.tier == tier and a.kind == "copy"]
        try:
            copies.place.forget(copies.prefix, wanted)
        # Uploads that stay cost money, not data: the pass is a success all the same.
        except TierError as error:
            append_event(self._paths, TierFailed(tier, what="forget", problem=error.one_line()))

    def _copies(self, name: str) -> RunCopies:
        copies = self._tiers[name].copies
        assert copies is not None, "only reachable tiers have actions"
        return copies
