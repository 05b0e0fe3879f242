"""Runs one pass over all tiers: looks, plans, carries out the plan. May be killed at any point and run again.

Copies come first, nearest tier and newest checkpoint first. Then come removals, each after its witnesses were read back
once more (every byte, from that tier). A failure is recorded and does not stop the rest. If the run has a key, no
checkpoint without its signature is copied, or counts as a witness for a removal.

Every checkpoint that was copied or removed is one line in `events.jsonl`: `tier_copied`, `tier_removed`, `tier_failed`,
`tier_unreachable`. The daemon writes to the same file; one line is one O_APPEND write.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil

from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused, PermissionRefused, TierError, VerlSlurmError
from verl_slurm.base.keys import Keyring, load_keys
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.manifest import parse
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.config.changes import require_in_place
from verl_slurm.config.checks.tiers import LOCAL_TIER
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import TierCopied, TierFailed, TierRemoved, TierUnreachable
from verl_slurm.journal.files import append_event
from verl_slurm.tiers.backend import Backend
from verl_slurm.tiers.census import Memory, OpenTier, local_stamp, record_of, signature_word, survey
from verl_slurm.tiers.opening import mover_lock, open_tiers
from verl_slurm.tiers.tier_layout import TierRecord, checkpoint_prefix, manifest_key, parse_key
from verl_slurm.tiers.tier_plan import Action, TierState, plan_tiers
from verl_slurm.tiers.transfer import DirectoryOrigin, Origin, TierOrigin, copy_checkpoint, verify_copy


@dataclass(frozen=True, kw_only=True)
class ActionResult:
    """Result of one action. `problem` is empty when it was carried out."""

    action: Action
    problem: str = ""
    sent: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The survey, plan and results of a pass; `done` has the copies and removals, in order.

    Attributes:
        unchecked: for a look: why no signature was checked, though the run has a key.
    """

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

    If the run's key cannot be read, as on a login node, `Pass.unchecked` tells so, and `sync` would refuse. A look at a
    copied run is allowed, too.
    """
    keys, unchecked = None, ""
    try:
        keys = load_keys(config.checkpoint.encryption)
    except (KeyRefused, PermissionRefused) as error:
        unchecked = f"{error.what}: {error.where}"
    states = survey(paths, open_tiers(paths, config), Memory.load(paths), keys)
    return Pass(states=tuple(states), plan=tuple(plan_tiers(states, now())), unchecked=unchecked)


def sync(
    paths: RunPaths,
    config: RunConfig,
    *,
    dry_run: bool = False,
    now: Callable[[], datetime] = _now,
    tiers: Sequence[OpenTier] | None = None,
) -> Pass:
    """Runs one pass.

    Args:
        dry_run: plan it, and carry out nothing (`look`).
        tiers: for tests: opened ones in place of the config's.

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
        self._paths, self._now, self._memory, self._keys = paths, now, Memory.load(paths), keys
        self._all = tiers
        self._tiers = {tier.config.name: tier for tier in tiers}
        self._witnesses: dict[tuple[str, str], list[str]] = {}

    def run(self) -> Pass:
        states = survey(self._paths, self._all, self._memory, self._keys)
        for state in states:
            if not state.reachable:
                append_event(self._paths, TierUnreachable(state.name, state.detail))
        for copy in states[0].copies:
            if copy.refused:
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

    # ---- copies

    def _copy(self, action: Action) -> int:
        name, tier = action.name, self._tiers[action.tier]
        backend = self._backend(action.tier)
        if action.source == action.tier:
            problems = self._read_back(action.tier, name)
            if problems:
                # The result is remembered by now, so the next pass plans to mend it.
                raise TierError("does not verify there", where=f"{action.tier}: {name}", found=problems[0])
            return 0
        if action.replace:
            self._require_whole(action.source, name)  # or both would be lost
            # The commit record first: objects of two checkpoints under one manifest must never count.
            backend.delete(manifest_key(tier.run, name))
            backend.forget(checkpoint_prefix(tier.run, name))  # uploads of the other one
        try:
            origin = self._origin(action.source, name)
            copied = copy_checkpoint(origin, backend, tier.run, name, keys=self._keys)
        except CheckpointCorrupt as error:
            # Remembered, so that the next pass takes another source instead of the same bytes again.
            self._condemn(action.source, name, error.one_line())
            raise
        record = record_of(copied.manifest, backend, tier.run, ok=True, now=self._now, keys=self._keys)
        self._memory.set(action.tier, name, record)
        # Every byte was read and hashed on its way, so tier 0's copy is verified. With files that were there already it
        # was not.
        if action.source == LOCAL_TIER and copied.sent == copied.num_bytes:
            self._remember_local(name, ok=True)
        return copied.sent

    def _origin(self, source: str, name: str) -> Origin:
        if source == LOCAL_TIER:
            return DirectoryOrigin(self._paths.checkpoints / name)
        return TierOrigin(self._backend(source), self._tiers[source].run, name)

    def _require_whole(self, source: str, name: str) -> None:
        if source == LOCAL_TIER:
            verdict = verify(self._paths.checkpoints / name, keys=self._keys, threads=1)
            # Not for a file that could not be read: that tells about the storage of now, not about the checkpoint.
            if verdict.damaged:
                self._remember_local(name, ok=False, detail=verdict.one_line())
            problems = [str(problem) for problem in verdict.problems]
        else:
            problems = self._read_back(source, name)
        if problems:
            raise TierError("its successor does not verify", where=f"{source}: {name}", found=problems[0])

    def _say_refused(self, name: str, detail: str) -> None:
        """Writes one line to the journal for each unsigned checkpoint."""
        # Once and not in every pass: what is remembered as refused was reported.
        record = self._memory.get(LOCAL_TIER, name)
        # The stamp changes with the manifest: another refused checkpoint of that name is reported again.
        if record is None or (record.signature, record.stamp) != ("refused", local_stamp(self._paths, name)):
            append_event(self._paths, TierFailed(LOCAL_TIER, name, "copy", detail))
            self._remember_local(name, ok=False, detail=detail)

    def _condemn(self, source: str, name: str, detail: str) -> None:
        """Records that a source does not hold what its manifest says; nothing is copied from it again."""
        if source == LOCAL_TIER:
            self._remember_local(name, ok=False, detail=detail)
        else:
            self._read_back(source, name)

    def _remember_local(self, name: str, *, ok: bool, detail: str = "") -> None:
        try:
            manifest = read_manifest(self._paths.checkpoints / name)
        except (OSError, VerlSlurmError):
            return
        record = TierRecord(
            digest=manifest.digest,
            attempt=manifest.attempt,
            created_utc=manifest.created_utc,
            stamp=local_stamp(self._paths, name),
            num_bytes=manifest.num_bytes,
            num_objects=len(manifest.files),
            ok=ok,
            checked_utc=self._now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            detail=detail[:500],
            signature=signature_word(manifest, self._keys),
        )
        self._memory.set(LOCAL_TIER, name, record)

    def _read_back(self, tier_name: str, name: str) -> list[str]:
        """Reads every byte of a checkpoint in a tier, and records the result."""
        tier, backend = self._tiers[tier_name], self._backend(tier_name)
        problems = verify_copy(backend, tier.run, name, keys=self._keys)
        try:
            parsed = parse(TierOrigin(backend, tier.run, name).manifest(), where=name)
        except VerlSlurmError:
            # No manifest that parses: there is nothing that a record could be compared with.
            self._memory.set(tier_name, name, None)
            return problems
        detail = problems[0] if problems else ""
        self._memory.set(
            tier_name,
            name,
            record_of(
                parsed, backend, tier.run, ok=not problems, now=self._now, keys=self._keys, detail=detail
            ),
        )
        return problems

    # ---- removals

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
        tier, backend = self._tiers[action.tier], self._backend(action.tier)
        backend.delete(manifest_key(tier.run, action.name))
        self._memory.set(action.tier, action.name, None)
        # The manifest is gone, so a death from here on leaves a checkpoint that does not exist.
        prefix = checkpoint_prefix(tier.run, action.name)
        for info in list(backend.list(prefix)):
            # Keys of another form were not made by us, and stay.
            if parse_key(tier.run, info.key) is not None:
                backend.delete(info.key)
        return 0

    def _forget(self, tier_name: str, plan: Sequence[Action]) -> None:
        """Abandons uploads of checkpoints that no pass copies any more."""
        # Parts of an upload cost money until it is aborted. Those that this pass has not finished are continued.
        tier = self._tiers[tier_name]
        wanted = [
            checkpoint_prefix(tier.run, action.name)
            for action in plan
            if action.tier == tier_name and action.kind == "copy"
        ]
        try:
            self._backend(tier_name).forget(tier.run, wanted)
        # Uploads that stay cost money, not data: the pass is a success all the same.
        except TierError as error:
            append_event(self._paths, TierFailed(tier_name, what="forget", problem=error.one_line()))

    def _backend(self, name: str) -> Backend:
        backend = self._tiers[name].backend
        assert backend is not None, "only reachable tiers have actions"
        return backend
