"""Decides what moves where, what goes, and why. Pure. `mover.py` carries out the plan.

A checkpoint is newer if a later attempt saved it, and within one attempt by its step. A run that was told to go back to
step 500 leaves a step 1000 in its tiers that is not newer than its own 501. The rules, in the order in which they bind:

1. The last good checkpoint (the newest that is verified in any tier) is never removed from any tier, nor is the newest
  verified one of a tier from that tier.
2. An archive, a tier without `keep_days`, and tier 0 (the run's own directory, where `checkpoint.keep_last` decides)
  lose nothing here.
3. A checkpoint goes from a tier when it is older than that tier's `keep_days`, no later tier still waits for it, AND it
  is verified in a later tier, or a newer one is verified in the next tier (for the last tier: in that tier itself).
  These witnesses must themselves stay, and the mover reads them back once more before it removes anything. A later tier
  that does not answer waits for whatever it would keep.
4. An unverified checkpoint never counts as a copy, nor does one that cannot be seen (its tier does not answer).
5. Every checkpoint that is good in some tier is copied to every later tier in which it would not be too old at once.
  The last good one, and the newest that may be good, are copied to all of them.
6. Objects in a tier without a commit record, of a checkpoint that is whole in no tier, are litter of a dead upload.
  They go once a newer checkpoint is verified there, from an archive too: no such checkpoint ever existed in that tier.
  A commit record that this code cannot read is no litter: it stays.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from verl_slurm.checkpoint.format.manifest import checkpoint_order

Kind = Literal["copy", "drop", "keep", "skip"]
"""copy: make it whole and verified there. drop: remove it there. keep: it is there and stays. skip: it is not there and
need not be. `checkpoint.decide.retention`, which decides for the run's own directory, uses the same words."""

_Rank = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class TierCopy:
    """One checkpoint in one tier.

    Attributes:
        committed: a manifest that parses is there, and every object it names, in its size.
        verified: every byte was read back there and matched (True), some did not (False), not checked (None).
        attempt: the attempt that saved it; -1 without a manifest.
        saved: time of the save, by its manifest; None without one.
        litter: not even a damaged commit record is there.
        refused: no key of the run has signed it: never `verified`, nor copied from; `detail` has the reason.
        detail: why it is not committed, or what does not match.
    """

    name: str
    committed: bool
    verified: bool | None = None
    digest: str = ""
    attempt: int = -1
    saved: datetime | None = None
    num_bytes: int = 0
    litter: bool = False
    refused: bool = False
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.committed and self.verified is True

    @property
    def usable(self) -> bool:
        """Returns whether it may be copied from: the mover checks every byte on the way."""
        return self.committed and self.verified is not False


@dataclass(frozen=True, kw_only=True)
class TierState:
    """One tier, as far as it could be seen, with what it keeps for `keep_days` (None: permanently).

    `reachable` is False where it did not answer; `copies` is empty then, and tells nothing.
    """

    name: str
    keep_days: int | None = None
    reachable: bool = True
    local: bool = False
    copies: tuple[TierCopy, ...] = ()
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Action:
    """One thing to do, or not to do, with one checkpoint in one tier.

    Attributes:
        source: of a copy: the tier to read from; the tier itself when it only has to be read back there.
        replace: of a copy: another, older checkpoint has that name there and goes first.
        witnesses: of a removal: (tier, checkpoint) that must still verify when it is carried out.
    """

    kind: Kind
    name: str
    tier: str
    reason: str
    source: str = ""
    replace: bool = False
    witnesses: tuple[tuple[str, str], ...] = ()


def last_good(states: Sequence[TierState]) -> str | None:
    """Returns the newest checkpoint that is verified in any tier that answers."""
    names = {copy.name for state in states if state.reachable for copy in state.copies if copy.good}
    ranks = _ranks(states)
    return max(names, key=lambda name: ranks[name]) if names else None


def newest_first(states: Sequence[TierState]) -> list[str]:
    """Lists what could be brought back from these tiers."""
    names = {copy.name for state in states if state.reachable for copy in state.copies if copy.usable}
    ranks = _ranks(states)
    return sorted(names, key=lambda name: ranks[name], reverse=True)


def plan_tiers(states: Sequence[TierState], now: datetime) -> list[Action]:
    """Plans one action for every checkpoint in every tier that answers, nearest tier first, newest first.

    `states` are all tiers, tier 0 first, then as the config lists them; `now` has a zone.
    """
    ranks = _ranks(states)
    names = sorted(ranks, key=lambda name: ranks[name], reverse=True)
    found = {state.name: {copy.name: copy for copy in state.copies} for state in states}
    # Over all tiers, not in each: what is newest somewhere may be missing or damaged in the others.
    best = last_good(states)
    needed = {best, *newest_first(states)[:1]}  # whatever their age
    planned: dict[tuple[str, str], Action] = {}
    staying: dict[str, dict[str, str]] = {}  # by tier: what is good there and stays, to its digest
    waiting: dict[str, dict[str, str]] = {}  # by checkpoint: the tiers that are to get it
    # The last tier first: what a removal relies upon must have been planned to stay before.
    for index in reversed(range(len(states))):
        state = states[index]
        staying[state.name] = {}
        if not state.reachable:
            for name in names:
                copies = [found[s.name][name] for s in states[:index] if name in found[s.name]]
                # It may lack a copy that it should get: an earlier tier must not drop the one that it would be made
                # from.
                if any(copy.usable and _age(copy, now) <= _limit(state) for copy in copies):
                    waiting.setdefault(name, {})[state.name] = "which does not answer"
            continue
        here = found[state.name]
        # Rule 1 for this tier by itself: it must not be emptied because another tier has more.
        newest_here = max((n for n, c in here.items() if c.good), key=lambda n: ranks[n], default=None)
        # Newest first, so that a newer one of this tier is known to stay before it serves as a witness.
        for name in names:
            copy = here.get(name)
            action = _copying(states, index, found, name, copy, needed, now)
            if action is None and copy is not None:
                action = _removal(
                    states, index, copy, best, newest_here, staying, waiting.get(name, {}), ranks, now
                )
            if action is None:
                continue
            planned[state.name, name] = action
            if action.kind == "copy":
                # The tiers before this one are planned after it and keep their copy until this one has been read back.
                waiting.setdefault(name, {})[state.name] = "which is to have it"
            # A copy that is still to be made is no witness: it may fail.
            if copy is not None and copy.good and action.kind == "keep":
                staying[state.name][name] = copy.digest
    return [planned[s.name, name] for s in states for name in names if (s.name, name) in planned]


def _copying(
    states: Sequence[TierState],
    index: int,
    found: dict[str, dict[str, TierCopy]],
    name: str,
    copy: TierCopy | None,
    needed: Collection[str | None],
    now: datetime,
) -> Action | None:
    """Decides whether `name` is to be copied here; None if the question does not arise."""
    state = states[index]
    # Tier 0 is filled by the run, and by `fetch` on demand.
    if state.local:
        return None
    # What could be copied from.
    elsewhere = [(s, found[s.name].get(name)) for s in states if s.name != state.name and s.reachable]
    # A verified source before one that nobody checked, then the nearest.
    sources = sorted(
        ((s, c) for s, c in elsewhere if c is not None and c.usable), key=lambda pair: not pair[1].good
    )
    replace = False
    # What is here is judged first: whole and read back, it needs nothing.
    if copy is not None and copy.committed:
        # Of one name with another digest: the run was thrown back and saved this step again.
        later = [(s, c) for s, c in sources if c.digest != copy.digest and _succeeds(s, c, copy)]
        if later:
            newest = max(c.attempt for _, c in later)
            sources = [(s, c) for s, c in later if c.attempt == newest]
            replace = True
        elif copy.verified is True:
            return None
        elif copy.verified is None:
            reason = "there, but nobody has read it back"
            return Action(kind="copy", name=name, tier=state.name, source=state.name, reason=reason)
        else:
            # Damaged here: mended from the same checkpoint alone. Another one of that name would be a replacement.
            sources = [(s, c) for s, c in sources if c.digest == copy.digest]
    # Nothing to copy from: kept as it is, or left to `_removal`.
    if not sources:
        if copy is None:
            refused = [c for s, c in elsewhere if c is not None and c.refused]
            if not refused:
                return None
            return Action(kind="skip", name=name, tier=state.name, reason=f"not copied: {refused[0].detail}")
        reason = f"not good here ({copy.detail or 'incomplete'}), and nowhere whole to mend it from"
        old = copy.saved is not None and _age(copy, now) > _limit(state)
        # None leaves it to `_removal`.
        return None if copy.litter or (old and not copy.committed) else _keep(state, name, reason)
    if copy is None or not copy.committed:
        # An older attempt would be replaced by the newest at the next pass, and may be too old by then to stay.
        newest = max(c.attempt for _, c in sources)
        sources = [(s, c) for s, c in sources if c.attempt == newest]
    source, best_copy = sources[0]
    if copy is None or not copy.committed:
        # Or the next pass would remove what this one copied.
        if name not in needed and state.keep_days is not None and _age(best_copy, now) > _limit(state):
            if copy is not None:
                return None  # the remains of an upload that nobody needs any more
            reason = f"older than {state.keep_days} days"
            return Action(kind="skip", name=name, tier=state.name, reason=reason)
        reason = "not here yet" if copy is None else f"an upload broke off ({copy.detail or 'no manifest'})"
    elif replace:
        reason = f"saved again since: attempt {best_copy.attempt}, here attempt {copy.attempt}"
    else:
        reason = f"damaged here ({copy.detail or 'does not verify'})"
    return Action(kind="copy", name=name, tier=state.name, source=source.name, reason=reason, replace=replace)


def _succeeds(state: TierState, other: TierCopy, copy: TierCopy) -> bool:
    """Returns whether `other`, of the same name, was saved after `copy`: the run went back and passed here again."""
    # Within one attempt the run's own directory has the later one: tiers are filled from it.
    return other.attempt > copy.attempt or (state.local and other.attempt == copy.attempt)


def _removal(
    states: Sequence[TierState],
    index: int,
    copy: TierCopy,
    best: str | None,
    newest_here: str | None,
    staying: dict[str, dict[str, str]],
    waiting: dict[str, str],
    ranks: dict[str, _Rank],
    now: datetime,
) -> Action:
    """Decides whether the copy here goes (rules 1 to 3, 6)."""
    state, name = states[index], copy.name
    if state.local:
        return _keep(state, name, "tier 0: checkpoint.keep_last decides")
    # Rule 1.
    if name == best:
        return _keep(state, name, "the last good checkpoint")
    if name == newest_here:
        return _keep(state, name, "the newest verified one of this tier")
    # Rule 6, from an archive too: it stands before rule 2.
    if copy.litter:
        # By step: litter has no manifest that tells its attempt.
        newer = [n for n in staying[state.name] if _order(n) > _order(name)]
        if not newer:
            return _keep(state, name, f"{copy.detail}; nothing newer is verified here yet")
        return Action(
            kind="drop",
            name=name,
            tier=state.name,
            reason=f"{copy.detail}: an upload that nobody can complete any more",
            witnesses=((state.name, max(newer, key=_order)),),
        )
    # Rule 2: an archive.
    if state.keep_days is None:
        return _keep(state, name, "for ever")
    # Without a time there is no age. Nothing is removed by a guess.
    if copy.saved is None:
        return _keep(state, name, copy.detail or "its manifest does not say when it was saved")
    age = f"{_days(copy, now)} old, kept {state.keep_days} days"
    if _age(copy, now) <= _limit(state):
        return _keep(state, name, age)
    for other, why in waiting.items():
        return _keep(state, name, f"{age}, but needed for {other}, {why}")
    # Rule 3: the same digest, since a step that was saved again has the same name.
    later = [s for s in states[index + 1 :] if staying[s.name].get(name) == copy.digest]
    if later:
        return Action(
            kind="drop",
            name=name,
            tier=state.name,
            reason=f"{age}; verified in {later[0].name}",
            witnesses=((later[0].name, name),),
        )
    beyond = states[index + 1] if index + 1 < len(states) else state
    # By rank, not by step: after a run was thrown back, a lower step of a later attempt is the newer one.
    newer = [n for n in staying[beyond.name] if ranks[n] > ranks[name]]
    if newer:
        witness = max(newer, key=lambda n: ranks[n])
        return Action(
            kind="drop",
            name=name,
            tier=state.name,
            reason=f"{age}; {beyond.name} has {witness}, newer and verified",
            witnesses=((beyond.name, witness),),
        )
    return _keep(state, name, f"{age}, but {beyond.name} has neither it nor a newer one, verified")


def _keep(state: TierState, name: str, reason: str) -> Action:
    return Action(kind="keep", name=name, tier=state.name, reason=reason)


def _ranks(states: Sequence[TierState]) -> dict[str, _Rank]:
    """Ranks how new each checkpoint is: by the last attempt that saved it, then by its step and safe point."""
    attempts: dict[str, int] = {}
    for copy in (copy for state in states for copy in state.copies):
        # One rank for a name in all tiers, by its newest copy: the older one in some tier is to be replaced, not
        # ranked.
        attempts[copy.name] = max(attempts.get(copy.name, -1), copy.attempt)
    return {name: (attempt, *_order(name)) for name, attempt in attempts.items()}


def _order(name: str) -> tuple[int, int]:
    return checkpoint_order(name) or (-1, -1)


def _limit(state: TierState) -> timedelta:
    return timedelta.max if state.keep_days is None else timedelta(days=state.keep_days)


def _age(copy: TierCopy, now: datetime) -> timedelta:
    # As if new: what does not say its age is never too old.
    return timedelta(0) if copy.saved is None else now - copy.saved


def _days(copy: TierCopy, now: datetime) -> str:
    return f"{_age(copy, now) / timedelta(days=1):.1f} days"
