"""What moves where, what goes, and why: pure. `mover.py` carries the very plan out.

The rules, in the order in which they bind:

1. The last good checkpoint (the newest that is verified in any tier) is never removed, from nowhere; nor is the newest
   verified one of a tier from that tier.
2. An archive, a tier without `keep_days`, and tier 0 (the run's own directory, where `checkpoint.keep_last` decides)
   lose nothing here.
3. A checkpoint goes from a tier when it is older than that tier's `keep_days` AND it is verified in a later tier, or
   a newer one is verified in the next tier (of the last tier: in that tier itself). These witnesses must themselves
   stay, and the mover reads them back once more before it removes anything.
4. A checkpoint that is not verified never counts as a copy. One that cannot be seen (its tier does not answer) neither.
5. Every checkpoint that is good somewhere is copied to every later tier in which it would not be too old at once; the
   last good one to all of them.
6. What lies in a tier without a commit record and is not being copied there is litter of a dead upload: it goes as a
   checkpoint of its age would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from verl_slurm.checkpoint.manifest import checkpoint_order

__all__ = ["Action", "TierCopy", "TierState", "last_good", "plan_tiers"]

Kind = Literal["copy", "remove", "keep", "skip"]
"""copy: make it whole and verified there. keep: it is there and stays. skip: it is not there and need not be."""


@dataclass(frozen=True, kw_only=True)
class TierCopy:
    """One checkpoint as one tier has it.

    Attributes:
        committed: a manifest that parses is there, and every object it names, in its size.
        verified: every byte was read back there and matched (True), some did not (False), nobody looked (None).
        digest: of the manifest; empty without one.
        epoch: the incarnation that saved it; -1 without a manifest.
        saved: when, by its manifest; None without one.
        detail: why it is not committed, or what does not match.
    """

    name: str
    committed: bool
    verified: bool | None = None
    digest: str = ""
    epoch: int = -1
    saved: datetime | None = None
    num_bytes: int = 0
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.committed and self.verified is True

    @property
    def usable(self) -> bool:
        """May be copied from: the mover checks every byte on the way."""
        return self.committed and self.verified is not False


@dataclass(frozen=True, kw_only=True)
class TierState:
    """One tier, as far as it could be seen.

    Attributes:
        keep_days: None: for ever.
        reachable: False: it did not answer; `copies` is empty and says nothing.
        local: tier 0.
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
        replace: of a copy: what is there under that name is another, older checkpoint and goes first.
        witnesses: of a removal: (tier, checkpoint) that must still verify when it is carried out.
    """

    kind: Kind
    checkpoint: str
    tier: str
    reason: str
    source: str = ""
    replace: bool = False
    witnesses: tuple[tuple[str, str], ...] = ()


def last_good(states: Sequence[TierState]) -> str | None:
    """The newest checkpoint that is verified in any tier that answers."""
    names = {copy.name for state in states if state.reachable for copy in state.copies if copy.good}
    return max(names, key=_order) if names else None


def plan_tiers(states: Sequence[TierState], now: datetime) -> list[Action]:
    """One action for every checkpoint in every tier that answers, nearest tier first, newest checkpoint first.

    Args:
        states: all tiers, tier 0 first, then as the config lists them.
        now: the present time, with a zone.

    Called by: mover, cli.
    """
    names = sorted({copy.name for state in states for copy in state.copies}, key=_order, reverse=True)
    found = {state.name: {copy.name: copy for copy in state.copies} for state in states}
    best = last_good(states)
    planned: dict[tuple[str, str], Action] = {}
    staying: dict[str, set[str]] = {}
    # The last tier first: what a removal relies upon must have been planned to stay before.
    for index in reversed(range(len(states))):
        state = states[index]
        staying[state.name] = set()
        if not state.reachable:
            continue
        here = found[state.name]
        newest_here = max((n for n, c in here.items() if c.good), key=_order, default=None)
        # Newest first, so that a newer one of this tier is known to stay before it serves as a witness.
        for name in names:
            copy = here.get(name)
            action = _copying(states, index, found, name, copy, best, now)
            if action is None and copy is not None:
                action = _removal(states, index, copy, best, newest_here, staying, now)
            if action is None:
                continue
            planned[state.name, name] = action
            if copy is not None and copy.good and action.kind == "keep":
                staying[state.name].add(name)
    return [planned[s.name, name] for s in states for name in names if (s.name, name) in planned]


def _copying(
    states: Sequence[TierState],
    index: int,
    found: dict[str, dict[str, TierCopy]],
    name: str,
    copy: TierCopy | None,
    best: str | None,
    now: datetime,
) -> Action | None:
    """Whether `name` is to be brought here; None when that is no question."""
    state = states[index]
    if state.local:
        return None
    elsewhere = [(s, found[s.name].get(name)) for s in states if s.name != state.name and s.reachable]
    # A verified source before one that nobody checked, then the nearest.
    sources = sorted(
        ((s, c) for s, c in elsewhere if c is not None and c.usable), key=lambda pair: not pair[1].good
    )
    own = next((c for s, c in sources if s.local), None)
    replace = False
    if copy is not None and copy.committed:
        if own is not None and own.digest != copy.digest and own.epoch >= copy.epoch:
            sources = [(s, c) for s, c in sources if c.digest == own.digest]
            replace = True
        elif copy.verified is True:
            return None
        elif copy.verified is None:
            reason = "there, but nobody has read it back"
            return Action(kind="copy", checkpoint=name, tier=state.name, source=state.name, reason=reason)
        else:
            sources = [(s, c) for s, c in sources if c.digest == copy.digest]
    if not sources:
        if copy is None:
            return None
        reason = f"not good here ({copy.detail or 'incomplete'}), and nowhere whole to mend it from"
        old = copy.saved is None or _age(copy, now) > _limit(state)
        return None if not copy.committed and old else _keep(state, name, reason)
    source, best_copy = sources[0]
    if copy is None or not copy.committed:
        if name != best and state.keep_days is not None and _age(best_copy, now) > _limit(state):
            if copy is not None:
                return None  # the remains of an upload that nobody needs any more
            reason = f"older than {state.keep_days} days"
            return Action(kind="skip", checkpoint=name, tier=state.name, reason=reason)
        reason = "not here yet" if copy is None else f"an upload broke off ({copy.detail or 'no manifest'})"
    elif replace:
        reason = f"saved again since: epoch {best_copy.epoch}, here epoch {copy.epoch}"
    else:
        reason = f"damaged here ({copy.detail or 'does not verify'})"
    return Action(
        kind="copy", checkpoint=name, tier=state.name, source=source.name, reason=reason, replace=replace
    )


def _removal(
    states: Sequence[TierState],
    index: int,
    copy: TierCopy,
    best: str | None,
    newest_here: str | None,
    staying: dict[str, set[str]],
    now: datetime,
) -> Action:
    """Whether what is here goes (rules 1 to 3, 6)."""
    state, name = states[index], copy.name
    if state.local:
        return _keep(state, name, "tier 0: checkpoint.keep_last decides")
    if name == best:
        return _keep(state, name, "the last good checkpoint")
    if name == newest_here:
        return _keep(state, name, "the newest verified one of this tier")
    if state.keep_days is None:
        return _keep(state, name, "for ever")
    if copy.saved is None and copy.committed:
        return _keep(state, name, "its manifest does not say when it was saved")
    if copy.saved is not None and _age(copy, now) <= _limit(state):
        return _keep(state, name, f"{_days(copy, now)} old, kept {state.keep_days} days")
    age = "no commit record" if copy.saved is None else f"{_days(copy, now)} old, kept {state.keep_days} days"
    later = [s for s in states[index + 1 :] if s.reachable and name in staying[s.name]]
    if later:
        return Action(
            kind="remove",
            checkpoint=name,
            tier=state.name,
            reason=f"{age}; verified in {later[0].name}",
            witnesses=((later[0].name, name),),
        )
    beyond = states[index + 1] if index + 1 < len(states) else state
    newer = [n for n in staying[beyond.name] if _order(n) > _order(name)]
    if newer:
        witness = max(newer, key=_order)
        return Action(
            kind="remove",
            checkpoint=name,
            tier=state.name,
            reason=f"{age}; {beyond.name} has {witness}, newer and verified",
            witnesses=((beyond.name, witness),),
        )
    return _keep(state, name, f"{age}, but {beyond.name} has neither it nor a newer one, verified")


def _keep(state: TierState, name: str, reason: str) -> Action:
    return Action(kind="keep", checkpoint=name, tier=state.name, reason=reason)


def _order(name: str) -> tuple[int, int]:
    return checkpoint_order(name) or (-1, -1)


def _limit(state: TierState) -> timedelta:
    return timedelta.max if state.keep_days is None else timedelta(days=state.keep_days)


def _age(copy: TierCopy, now: datetime) -> timedelta:
    return timedelta(0) if copy.saved is None else now - copy.saved


def _days(copy: TierCopy, now: datetime) -> str:
    return f"{_age(copy, now) / timedelta(days=1):.1f} days"
