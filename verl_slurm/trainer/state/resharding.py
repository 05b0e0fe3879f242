"""Redistributes the state of a run that continues with another number of ranks. Pure.

Tensors need nothing: `save.ranks.loader` fills any rank's boxes from whatever pieces were saved. The rest is the
running step. Its rollouts come in global micro-batches, of which rank r of N has every N-th from r on
(`trainer.learner`). So those of all former ranks are put back into their global order and dealt out again:

* generating: a number that all new ranks can share equally is kept, the rest is replayed from the ledger;
* scoring: begins again, with the very weights it began with;
* advantage and update: every rank gets its share of the scored and whitened rows. The rows of an update do not depend
  on the number of ranks (`trainer.parallel.mini_batches`), so the remaining updates are the same ones.

The global batch, the global mini-batch and the size of a generation micro-batch stay (`config.changes`).
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from verl_slurm.runtime_state.format import Arrays, RuntimeState
from verl_slurm.trainer.state.position import Position, StepShape, rollout_offset, safe_point
from verl_slurm.trainer.state.reward_state import split

_BEFORE_SCORES = frozenset({"step_end", "generate", "score"})


def reshard(saved: Sequence[RuntimeState], old: StepShape, new: StepShape, rank: int) -> RuntimeState:
    """Returns the state of `rank` in the new layout.

    Args:
        saved: of all former ranks, in their order, all at the same position.
        old, new: shapes of the same step (`config.changes`).

    Returns:
        A state that `trainer.state.train_state.restore_state` takes. It lacks the generators of a rank that is new.
    """
    first = saved[0]
    position = Position(first.step, first.phase, first.index)
    # Global micro-batches that are there: the leaders stand at one position, so all have as many.
    blocks = _num_rows(first.rollouts) // old.prompts_per_generation * old.dp_size
    if first.phase == "generate":
        # As many as all new ranks can have alike: a position is one number for all. The ledger has the rest.
        blocks -= blocks % new.dp_size
        done = blocks // new.dp_size
        position = Position(first.step, "generate", done) if done else Position(first.step)
    elif first.phase == "score":
        # From its beginning, with the very weights that it began with: a micro-batch has another size now.
        position = Position(first.step, "score")

    def deal(group: Sequence[Arrays]) -> Arrays:
        names = group[0].keys()
        return {name: _deal([arrays[name] for arrays in group], old, new, blocks, rank) for name in names}

    rewards: Arrays = {}
    if first.phase not in _BEFORE_SCORES:
        # Rows are dealt out; the update metrics are sums, and the kept scores are divided below.
        rows = [{k: v for k, v in split(state.rewards)[1].items() if k != "updates"} for state in saved]
        rewards = deal(rows)
        if "updates" in first.rewards:
            # A rank's row is its share of a mean over ranks: one rank carries the sum, scaled to the new mean.
            whole = np.stack([state.rewards["updates"] for state in saved]).sum(axis=0, dtype=np.float64)
            scale = new.dp_size / old.dp_size if rank == 0 else 0.0
            rewards["updates"] = np.asarray(whole * scale)
    rewards |= _kept_scores([split(state.rewards)[0] for state in saved], new.dp_size, rank)
    consumed = rollout_offset(position, new)
    return msgspec.structs.replace(
        first,
        rank=rank,
        world_size=new.dp_size,
        phase=position.phase,
        index=position.index,
        safe_point=safe_point(position, new),
        rollout_offset=consumed,
        episode_id=consumed,
        rollouts=deal([state.rollouts for state in saved]) if blocks else {},
        rewards=rewards,
        rng=saved[rank].rng if rank < len(saved) else {},
    )


def _kept_scores(saved: Sequence[Arrays], dp_size: int, rank: int) -> Arrays:
    """Divides all ranks' scores kept for a change of the reward; their sum stays the same."""
    return {
        name: array
        if name == "switch"
        # Each response on one rank: a warm start sums over ranks, and would count a copy twice.
        else np.concatenate([part[name] for part in saved])[rank::dp_size].copy()
        for name, array in saved[0].items()
    }


def _deal(parts: Sequence[np.ndarray], old: StepShape, new: StepShape, blocks: int, rank: int) -> np.ndarray:
    """Deals rows of one column of all former ranks to `rank`; a block is one global micro-batch."""
    size = old.prompts_per_generation
    by_rank = np.stack(parts).reshape(old.dp_size, -1, size, *parts[0].shape[1:])
    # Rank r of N has every N-th micro-batch, so the global order goes over the ranks first.
    in_order = by_rank.swapaxes(0, 1).reshape(-1, *by_rank.shape[2:])
    mine = in_order[:blocks][rank :: new.dp_size]
    return np.ascontiguousarray(mine.reshape(-1, *mine.shape[2:]))


def _num_rows(columns: Arrays) -> int:
    return len(next(iter(columns.values()))) if columns else 0
