"""Decides what to keep and what to drop, each with its reason. Pure. `pruning.py` carries it out.

keep and drop together are all committed checkpoints; torn, quarantined and foreign entries are not planned. A plan
keeps, in this order of reasons:

1. the newest `keep_last`;
2. older ones, while too few of the kept ones are verified;
3. with `keep_every=K`, permanently: the first at or after each multiple of K;
4. with `keep_best=N`, the best N by a metric of their step (`best.py`);
5. checkpoints in use.

A run resumes from those of rules 1 and 2; the others are results.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from verl_slurm.checkpoint.decide.best import Best, latest_reward, rank_best, reward_of
from verl_slurm.checkpoint.format.info import CheckpointInfo

ASSURED_KEPT = 2
"""`num_verified` of a trainer that has just saved. What it wrote is not read back, so one more stays."""


@dataclass(frozen=True, kw_only=True)
class Reasoned:
    """A checkpoint's name and the reason for keeping or dropping it."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """The plan, newest first.

    Attributes:
        assured: enough of the kept ones are known to verify; `apply_prune` need not check that itself.
        working: names kept by rules 1 and 2: a run resumes from these.
    """

    keep: tuple[Reasoned, ...]
    drop: tuple[Reasoned, ...]
    assured: bool
    working: frozenset[str] = frozenset()


def plan_prune(
    infos: Sequence[CheckpointInfo],
    keep_last: int,
    *,
    keep_every: int = 0,
    best: Best | None = None,
    verified: Collection[str] | None = None,
    num_verified: int | None = None,
    protected: Collection[str] = (),
) -> PrunePlan:
    """Plans to keep the newest `keep_last` of the committed ones in `infos`, and others by the rules above.

    Args:
        verified: names known to verify; nothing is dropped while they are too few. None: none is known, and
            `apply_prune` checks before it drops.
        num_verified: how many of them must be kept before anything older is dropped. Default: `keep_last`.
        protected: names that always stay (one that is being read).

    Raises:
        ValueError: `keep_last` or `num_verified` is below 1, or `keep_every` or `best.keep` is below 0.
    """
    needed = keep_last if num_verified is None else num_verified
    # The newest is never dropped.
    if min(keep_last, needed) < 1:
        raise ValueError(f"keep_last is {keep_last} and num_verified {needed}, at least 1")
    if keep_every < 0 or (best is not None and best.keep < 0):
        raise ValueError(f"keep_every is {keep_every} and best {best}, at least 0")
    committed = sorted((i for i in infos if i.kind == "committed"), key=lambda i: i.order, reverse=True)
    for_ever = _for_ever(committed, keep_every)
    best = best or Best(keep=0)
    ranks, latest = rank_best(committed, best), latest_reward(committed, best)
    keep: list[Reasoned] = []
    drop: list[Reasoned] = []
    working: set[str] = set()
    good = 0
    for number, info in enumerate(committed, start=1):
        name = info.name
        if number <= keep_last:
            reason = f"number {number} of the newest {keep_last}"
        # The newest is not relied upon before it has been read back.
        elif verified is not None and good < needed:
            reason = f"of the newer ones {good} are known to be whole, before that is {needed} nothing goes"
        elif name in for_ever:
            reason = f"the first from step {for_ever[name]} on, one in every {keep_every} is kept for ever"
        elif name in ranks:
            rank = ranks[name]
            reason = f"number {rank.number} of the best {best.keep} by {best.metric}: {rank.value:g}"
        elif name in protected:
            reason = "in use"
        else:
            drop.append(Reasoned(name=name, reason=_why_dropped(info, keep_last, keep_every, best, latest)))
            continue
        # These need the rollouts that the ledger recorded since. From one that is kept permanently they can be sampled
        # again.
        if number <= keep_last or (verified is not None and good < needed):
            working.add(name)
        # Counted after the decision, from the newest on: each name is judged by those that are newer.
        good += verified is not None and name in verified
        keep.append(Reasoned(name=name, reason=reason))
    return PrunePlan(keep=tuple(keep), drop=tuple(drop), assured=good >= needed, working=frozenset(working))


def _why_dropped(info: CheckpointInfo, keep_last: int, keep_every: int, best: Best, latest: float) -> str:
    words = [f"older than the newest {keep_last}"]
    if keep_every:
        words.append(f"none of every {keep_every}")
    if best.keep:
        value = info.metrics.get(best.metric)
        if value is None:
            words.append(f"without {best.metric}")
        elif reward_of(info.metrics) < latest:
            words.append(f"with {best.metric} {value:g} by a reward that was replaced")
        else:
            words.append(f"with {best.metric} {value:g} not among the best {best.keep}")
    return " and ".join(words)


def _for_ever(newest_first: Sequence[CheckpointInfo], keep_every: int) -> dict[str, int]:
    """Maps each name to the multiple of `keep_every` that it stands for."""
    if not keep_every:
        return {}
    # Not the multiples themselves: an adaptive cadence may never save at one (30 for K=25), and is still to leave one
    # in every K steps.
    first: dict[int, str] = {}
    for info in newest_first:
        # 0 is no multiple: the steps before the first one have nothing to stand for.
        if multiple := info.step // keep_every * keep_every:
            first[multiple] = info.name  # the oldest comes last and stays
    return {name: multiple for multiple, name in first.items()}
