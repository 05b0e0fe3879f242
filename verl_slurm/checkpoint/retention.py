"""What to keep and what to drop, each with its reason: pure. `apply.py` carries it out.

keep and drop together are all committed checkpoints; torn, quarantined and foreign entries are nobody's to
plan.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from verl_slurm.checkpoint.info import CheckpointInfo

__all__ = ["PrunePlan", "Reasoned", "plan_prune"]


@dataclass(frozen=True, kw_only=True)
class Reasoned:
    """A checkpoint's name and why it is kept or dropped."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """Newest first.

    Attributes:
        assured: one that is kept is known to verify, so `apply_prune` need not check that itself.
    """

    keep: tuple[Reasoned, ...]
    drop: tuple[Reasoned, ...]
    assured: bool


def plan_prune(
    infos: Sequence[CheckpointInfo],
    keep_last: int,
    *,
    verified: Collection[str] | None = None,
    protected: Collection[str] = (),
) -> PrunePlan:
    """Keep the newest `keep_last` checkpoints, drop what is older than all of them.

    Args:
        infos: a catalog, in any order; only committed ones are looked at.
        keep_last: at least 1.
        verified: names that are known to verify. Then only those count towards `keep_last`: one that was
            not checked is kept while it is newer, and nothing is dropped while none is known to be good.
            None: nothing is known; the plan counts all, and `apply_prune` makes sure before it drops.
        protected: names that stay whatever happens (one that is being read).

    Raises:
        ValueError: `keep_last` is below 1: the newest is never dropped.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}, at least 1")
    keep: list[Reasoned] = []
    drop: list[Reasoned] = []
    counted = 0
    committed = [i for i in infos if i.kind == "committed"]
    for info in sorted(committed, key=lambda i: i.order, reverse=True):
        if counted < keep_last:
            good = verified is None or info.name in verified
            counted += good
            reason = (
                f"number {counted} of the newest {keep_last}"
                if good
                else "not verified yet, and older ones are not dropped before it"
            )
            keep.append(Reasoned(name=info.name, reason=reason))
        elif info.name in protected:
            keep.append(Reasoned(name=info.name, reason="in use"))
        else:
            drop.append(Reasoned(name=info.name, reason=f"older than the newest {keep_last}"))
    return PrunePlan(
        keep=tuple(keep), drop=tuple(drop), assured=verified is not None and counted == keep_last
    )
