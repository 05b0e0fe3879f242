"""A rank's state that later numbers depend on, besides weights and optimizers; to disk form and back.

Left out on purpose: sampling noise, data order, mini-batch order and learning rates are functions of the seed and the
position. The reference model never changes. Seconds and tokens per second are not numbers of the training and are
neither kept nor compared.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.config.roles import trained_roles
from verl_slurm.config.schema import RunConfig, TrainConfig
from verl_slurm.runtime_state.format import HISTORY_ROWS, Arrays, RuntimeState
from verl_slurm.save.ranks import rng
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.objective.advantages import AdaptiveKL
from verl_slurm.trainer.state.position import Position, StepShape, check_position, rollout_offset, safe_point
from verl_slurm.trainer.state.reward_state import RewardState, pack, split, unpack

UPDATE_METRICS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "policy_kl",
    "policy_clip",
    "value_clip",
    "actor_grad_norm",
    "critic_grad_norm",
)
"""Columns of `Buffers.updates`, one row per update: this rank's share of each mean (`update_metrics`)."""
_WITHOUT_CRITIC = tuple(name for name in UPDATE_METRICS if not name.startswith(("value_", "critic_")))


def update_metrics(train: TrainConfig) -> tuple[str, ...]:
    """Lists the columns of `Buffers.updates` that this algorithm has."""
    columns = UPDATE_METRICS if "critic" in trained_roles(train) else _WITHOUT_CRITIC
    return (*columns, "kl_loss") if train.kl_in == "loss" else columns


@dataclass
class Buffers:
    """The results of the running step so far on this rank; empty between steps. Grows phase by phase."""

    rollouts: list[Batch] = field(default_factory=list)
    """Finished generation micro-batches, in order (columns of `HFRollout.generate`)."""
    scored: list[Batch] = field(default_factory=list)
    """Scored micro-batches, float32: scores [n]; old_logprobs, ref_logprobs, old_values (critic) [n, T]."""
    estimates: Batch = field(default_factory=dict)
    """advantages, and with a critic returns, float32 [N, T]; empty before the advantage phase."""
    updates: list[list[float]] = field(default_factory=list)


@dataclass
class TrainState:
    """One rank's whole state between two positions. Mutable."""

    position: Position
    kl: AdaptiveKL
    history: list[dict[str, float]] = field(default_factory=list)
    """One row of metrics per finished step, the newest HISTORY_ROWS."""
    buffers: Buffers = field(default_factory=Buffers)
    reward: RewardState = field(default_factory=RewardState)

    def remember(self, row: dict[str, float]) -> None:
        """Adds a finished step's metrics."""
        # A new list: one that was handed to a save does not change while it is written.
        self.history = [*self.history, row][-HISTORY_ROWS:]


def fresh_state(config: RunConfig) -> TrainState:
    """Returns the state of a run that has done nothing."""
    train = config.train
    # From the configuration; `restore_state` puts coefficient and window of the checkpoint in.
    kl = AdaptiveKL(coef=train.kl_coef, target=train.kl_target, size=train.kl_window)
    return TrainState(Position(), kl, reward=RewardState(spec=config.model.reward))


def capture_state(
    state: TrainState, shape: StepShape, *, rank: int, world_size: int | None = None
) -> RuntimeState:
    """Returns this rank's state as it goes to disk, generators included. Draws and changes nothing.

    Args:
        world_size: ranks in all; None: data parallel alone.
    """
    position, buffers = state.position, state.buffers
    # One array for all micro-batches: another shape cuts the rows in another way.
    rewards = to_arrays(stacked(buffers.scored)) | to_arrays(buffers.estimates)
    if buffers.updates:
        # float64, which Python's floats are: a resume has the very same numbers.
        rewards["updates"] = np.array(buffers.updates, dtype=np.float64)
    # Follows from the position. Saved as well, so that a reader without the trainer has it, and a resume checks it.
    consumed = rollout_offset(position, shape)
    return RuntimeState(
        rank=rank,
        world_size=world_size or shape.dp_size,
        step=position.step,
        phase=position.phase,
        index=position.index,
        safe_point=safe_point(position, shape),
        rollout_offset=consumed,
        # A response is an episode, finished with its micro-batch.
        episode_id=consumed,
        kl_coef=state.kl.coef,
        kl_window=list(state.kl.window),
        rng={**rng.capture()},
        rollouts=to_arrays(stacked(buffers.rollouts)),
        rewards=rewards | pack(state.reward),
        history=state.history,
    )


def restore_state(saved: RuntimeState, config: RunConfig, shape: StepShape, *, where: object) -> TrainState:
    """Returns the state to train on from, and restores this process's generators.

    Raises:
        CheckpointCorrupt: the parts do not fit the position, or the position does not fit the configuration.
    """
    position = Position(saved.step, saved.phase, saved.index)
    # First: an index outside its phase would make all numbers below meaningless.
    check_position(position, shape, where=where)
    # Both follow from the position. Said twice, they show a state of other batch sizes.
    found = (saved.safe_point, saved.rollout_offset)
    expected = (safe_point(position, shape), rollout_offset(position, shape))
    if found != expected:
        raise _misfit(where, f"(safe point, prompts consumed) {found} at {position}", expected)
    # One table on disk: what is left when all known columns are taken out are the scored ones.
    reward, rewards = split(saved.rewards)
    updates = rewards.pop("updates", np.zeros((0, len(update_metrics(config.train)))))
    estimates = to_batch({name: rewards.pop(name) for name in ("advantages", "returns") if name in rewards})
    scored, rollouts = to_batch(rewards), to_batch(saved.rollouts)
    buffers = Buffers(
        # As one piece: later phases stack the pieces, whatever their number.
        rollouts=[rollouts] if rollouts else [],
        scored=[scored] if scored else [],
        estimates=estimates,
        updates=updates.tolist(),
    )
    _check_rows(buffers, position, config, shape, where)
    rng.restore(saved.rng)
    state = fresh_state(config)
    state.position, state.buffers, state.history = position, buffers, list(saved.history)
    state.reward = unpack(reward, where=where)
    # Target and window size stay those of the configuration; the coefficient is what the run has come to.
    state.kl = replace(state.kl, coef=saved.kl_coef, window=tuple(saved.kl_window))
    return state


def _check_rows(
    buffers: Buffers, position: Position, config: RunConfig, shape: StepShape, where: object
) -> None:
    """Checks the number of rows of every buffer against the position."""
    batch = shape.generations * shape.prompts_per_generation
    past = ("generate", "score", "advantage", "update", "evaluate").index
    # Between two steps the buffers are empty.
    at = -1 if position.phase == "step_end" else past(position.phase)
    done = position.index

    def rows(phase: int, one: int, most: int) -> int:
        return 0 if at < phase else min(one * done, most) if at == phase else most

    expected = {
        "rollouts": rows(0, shape.prompts_per_generation, batch),
        "scored": rows(1, config.train.micro_batch_size_per_device, batch),
        "estimates": batch if at > past("advantage") else 0,
        "updates": rows(3, 1, shape.updates),
    }
    found = {
        "rollouts": _num_rows(stacked(buffers.rollouts)),
        "scored": _num_rows(stacked(buffers.scored)),
        "estimates": _num_rows(buffers.estimates),
        "updates": len(buffers.updates),
    }
    if found != expected:
        raise _misfit(where, f"rows at {position}: {found}", expected)
    # Columns have no names on disk: another number of them would be read as other metrics.
    num_metrics = len(update_metrics(config.train))
    if any(len(row) != num_metrics for row in buffers.updates):
        raise _misfit(where, "another number of update metrics", num_metrics)


def _num_rows(batch: Batch) -> int:
    """Returns the rows of a batch whose columns agree; -1 where they do not."""
    # Columns of different lengths come from a damaged file; -1 fits no position.
    sizes = {len(column) for column in batch.values()}
    return 0 if not sizes else sizes.pop() if len(sizes) == 1 else -1


def stacked(parts: list[Batch]) -> Batch:
    """Concatenates micro-batches; no parts make an empty batch."""
    if len(parts) <= 1:
        return dict(parts[0]) if parts else {}
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def to_arrays(batch: Batch) -> Arrays:
    """Returns the same columns for numpy. Shares memory: do not change them afterwards."""
    return {name: tensor.numpy(force=True) for name, tensor in batch.items()}


def to_batch(arrays: Arrays) -> Batch:
    """Returns the same columns for torch, each in its own memory."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def _misfit(where: object, found: object, expected: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "the runtime state contradicts itself",
        where=where,
        found=found,
        expected=expected,
        remedy="resume from an older checkpoint (verl-slurm list RUN)",
    )
