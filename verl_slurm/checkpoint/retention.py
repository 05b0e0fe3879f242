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
    num_verified: int | None = None,
    protected: Collection[str] = (),
) -> PrunePlan:
    """Keep at least the newest `keep_last` checkpoints, drop what is older than all that are kept.

    Args:
        infos: a catalog, in any order; only committed ones are looked at.
        keep_last: at least 1.
        verified: names that are known to verify; nothing is dropped while there are too few of them.
            None: nothing is known; `apply_prune` makes sure before it drops.
        num_verified: so many of `verified` must be kept before anything older is dropped. Default:
            `keep_last`, so one that was not checked is kept besides, while it is newer.
        protected: names that stay whatever happens (one that is being read).

    Raises:
        ValueError: `keep_last` or `num_verified` is below 1: the newest is never dropped.
    """
    needed = keep_last if num_verified is None else num_verified
    if min(keep_last, needed) < 1:
        raise ValueError(f"keep_last is {keep_last} and num_verified {needed}, at least 1")
    keep: list[Reasoned] = []
    drop: list[Reasoned] = []
    newest = good = 0
    committed = [i for i in infos if i.kind == "committed"]
    for info in sorted(committed, key=lambda i: i.order, reverse=True):
        if newest < keep_last or (verified is not None and good < needed):
            newest += 1
            good += verified is not None and info.name in verified
            reason = (
                f"number {newest} of the newest {keep_last}"
                if newest <= keep_last
                else f"too few of the newer ones are known to verify, at least {needed}"
            )
            keep.append(Reasoned(name=info.name, reason=reason))
        elif info.name in protected:
            keep.append(Reasoned(name=info.name, reason="in use"))
        else:
            drop.append(Reasoned(name=info.name, reason=f"older than the newest {keep_last}"))
    return PrunePlan(keep=tuple(keep), drop=tuple(drop), assured=good >= needed)
