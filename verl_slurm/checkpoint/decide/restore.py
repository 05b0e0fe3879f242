"""Decides what to resume from, and why. Pure. `recover.py` asks, carries out the answer, and asks again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from verl_slurm.checkpoint.format.info import Verdict
from verl_slurm.checkpoint.format.manifest import checkpoint_order


@dataclass(frozen=True, kw_only=True)
class RestoreDecision:
    """The next thing to do.

    Attributes:
        action: verify: check `name` and ask again. use: resume from `name`. fresh: start from the beginning. refuse:
            neither; `name` is in the way and a person must look. wait: the same, but storage may give it later.
        set_aside: names that are damaged beyond doubt.
        reasons: one line for each checkpoint that was judged, newest first, and one for the outcome.
    """

    action: Literal["verify", "use", "fresh", "refuse", "wait"]
    name: str | None
    set_aside: tuple[str, ...]
    reasons: tuple[str, ...]


def decide_resume(names: Iterable[str], verdicts: Mapping[str, Verdict]) -> RestoreDecision:
    """Chooses the newest checkpoint that verifies, by the names of the directories and the verdicts so far.

    A damaged checkpoint is skipped and set aside. One that our key has not signed, and a partial one that somebody has
    put there, is skipped and left in place. One that cannot be read now is waited for; one that others may write is
    refused. One that has strays is good: they are moved out of it before it is used.
    """
    # One without a good manifest, too: a final name is judged and set aside, not passed over in silence. Staging
    # directories have no such name.
    orders = {name: order for name in names if (order := checkpoint_order(name)) is not None}
    reasons: list[str] = []
    damaged: list[str] = []
    doubtful: list[str] = []

    def decision(
        action: Literal["verify", "use", "fresh", "refuse", "wait"], name: str | None
    ) -> RestoreDecision:
        return RestoreDecision(action=action, name=name, set_aside=tuple(damaged), reasons=tuple(reasons))

    for name in sorted(orders, key=lambda name: orders[name], reverse=True):
        verdict = verdicts.get(name)
        # One at a time, newest first: each verification reads all bytes, and the first good one ends it.
        if verdict is None:
            return decision("verify", name)
        reasons.append(verdict.one_line())
        if verdict.is_whole and verdict.manifest is not None and verdict.manifest.components:
            reasons.append(f"{name} is a partial checkpoint: {', '.join(verdict.manifest.components)} only")
            continue
        if verdict.is_whole:
            reasons.append(f"{name} is the newest checkpoint that verifies")
            return decision("use", name)
        # Never skipped: the run would silently resume from an older state.
        if any(p.kind == "version" for p in verdict.problems):
            reasons.append(f"{name} is newer than this code: nothing older is used in its place")
            return decision("refuse", name)
        # Nor is this: an error of storage is no damage, and passes.
        if verdict.unreadable:
            reasons.append(f"{name} cannot be read now: nothing older is used in its place")
            return decision("wait", name)
        # Nor this. Others gain no power by it: who can put one here can also make it unreadable, which is waited for.
        if verdict.is_open:
            reasons.append(f"{name} may be written by others: nothing older is used in its place")
            return decision("refuse", name)
        (damaged if verdict.damaged else doubtful).append(name)
    # Not `fresh`: starting over would throw away what may be good.
    if doubtful:
        reasons.append(f"{doubtful[0]} may be good but cannot be used now, and nothing else verifies")
        return decision("refuse", doubtful[0])
    reasons.append("no checkpoint verifies" if damaged else "there is no checkpoint yet")
    return decision("fresh", None)
