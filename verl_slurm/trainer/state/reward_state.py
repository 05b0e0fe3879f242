"""The reward's part of a checkpoint: how often it was replaced, the rest of a warm start, the last scores.

In the runtime state it is a few arrays among the reward buffers. Without them the reward was never replaced.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.checkpoint.decide.best import REWARD_NUMBER
from verl_slurm.runtime_state.format import Arrays
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.objective.warm_start import IDENTITY, Affine, blended

CACHED_ROWS = 64
"""Responses of the last step that each rank keeps with their scores."""

_CACHED = "cached."
_COLUMNS = {
    "sample_id": ("int64", 1),
    "response_ids": ("int64", 2),
    "response_mask": ("bool", 2),
    "scores": ("float32", 1),
}
"""Type and dimensions."""
_SWITCH = "switch"


@dataclass(frozen=True, eq=False, kw_only=True)
class RewardState:
    """The reward in force on one rank, between two positions.

    Attributes:
        spec, digest: as in `model.reward`; of the model or source, empty for a rule.
        number: replacements so far; index into the run's record (`reward_plan`).
        since_step: the first step (from 0) that the present one scores.
        warm_steps: steps of its warm start; 0: none.
        full: the map to the former one's scale.
        cached: responses of the last step with the scores that the training saw (`_COLUMNS`); at most CACHED_ROWS.
    """

    spec: str = ""
    digest: str = ""
    number: int = 0
    since_step: int = 0
    warm_steps: int = 0
    full: Affine = IDENTITY
    cached: Batch = field(default_factory=dict)

    def map_at(self, step: int) -> Affine:
        """Returns the map of the present reward's scores in `step`."""
        # From the step's number alone: a step that is done again has the same map.
        return blended(self.full, step - self.since_step, self.warm_steps)

    @property
    def numbers(self) -> dict[str, float]:
        """Returns the columns of a step's row that identify the reward of its numbers."""
        # Numbers of different rewards are of different scales: the best checkpoints are ranked among one reward's rows.
        return {REWARD_NUMBER: float(self.number)} if self.number else {}

    def remember(self, rollouts: Batch, scored: Batch) -> "RewardState":
        """Returns the state with a finished step's scores kept."""
        # clone: a slice would keep the whole step's memory.
        whole = rollouts | scored
        return replace(self, cached={name: whole[name][:CACHED_ROWS].clone() for name in _COLUMNS})


def reward_record(state: RewardState, step: int) -> dict[str, object]:
    """Returns the record in metadata.json of the reward that scores `step` (from 0)."""
    now = state.map_at(step)
    return {
        "reward": state.spec,
        "since_step": state.since_step,
        "replacements": state.number,
        "warm_start_steps_left": max(state.since_step + state.warm_steps - step, 0),
        "scale": now.scale,
        "offset": now.offset,
    }


def pack(state: RewardState) -> Arrays:
    """Packs the state into arrays of the runtime state. Shares memory with `state`."""
    arrays: Arrays = {_CACHED + name: column.numpy() for name, column in state.cached.items()}
    # A run whose reward was never replaced has the arrays of one that knows no replacements.
    if state.number:
        numbers = (state.number, state.since_step, state.warm_steps, state.full.scale, state.full.offset)
        arrays[_SWITCH] = np.array(numbers, dtype=np.float64)
    return arrays


def split(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Splits arrays into (those that `pack` made, the rest)."""
    ours = {name: array for name, array in arrays.items() if name == _SWITCH or name.startswith(_CACHED)}
    return ours, {name: array for name, array in arrays.items() if name not in ours}


def unpack(arrays: Arrays, *, where: object) -> RewardState:
    """Returns what `pack` made, without `spec` and `digest`; raises `CheckpointCorrupt` for anything else."""
    kept = {name.removeprefix(_CACHED): array for name, array in arrays.items() if name.startswith(_CACHED)}
    found = {name: (str(array.dtype), array.ndim) for name, array in kept.items()}
    rows = {array.shape[0] for array in kept.values() if array.ndim}
    switch = arrays.get(_SWITCH, np.zeros(5))
    # What a checkpoint says is checked before it is used as an index or a factor.
    good = (not kept or (found == _COLUMNS and len(rows) == 1)) and switch.shape == (5,)
    if not good or switch.dtype != np.float64 or not np.isfinite(switch).all() or (switch[:4] < 0).any():
        raise CheckpointCorrupt(
            "the runtime state contradicts itself",
            where=where,
            found=f"kept scores {found} of {sorted(rows)} rows, replacement {switch.tolist()}",
            expected=f"columns {', '.join(_COLUMNS)} of as many rows",
            remedy="resume from an older checkpoint (verl-slurm list RUN)",
        )
    number, since, steps = (int(value) for value in switch[:3])
    # `spec` and `digest` are not saved here: the run's record has them by number (`start_reward`).
    full = Affine(float(switch[3]), float(switch[4])) if number else IDENTITY
    cached = {name: torch.from_numpy(np.array(array)) for name, array in kept.items()}
    return RewardState(number=number, since_step=since, warm_steps=steps, full=full, cached=cached)
