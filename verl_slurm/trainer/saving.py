"""What a checkpoint of this trainer consists of, when one is due, and what is cleaned up after it."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from verl_slurm.checkpoint.apply import apply_prune
from verl_slurm.checkpoint.catalog import list_checkpoints
from verl_slurm.checkpoint.format import SCHEMA_VERSION
from verl_slurm.checkpoint.retention import plan_prune
from verl_slurm.checkpoint.schema import SchemaVersion, render_schema
from verl_slurm.config.load import dump
from verl_slurm.config.schema import CheckpointConfig, RunConfig
from verl_slurm.dcp.collective import Collective
from verl_slurm.dcp.saver import Contents, Provenance, SavedCheckpoint, save
from verl_slurm.dcp.tensors import Tensors, model_tensors, optimizer_tensors
from verl_slurm.paths import RunPaths
from verl_slurm.runtime_state import ledger as journal
from verl_slurm.runtime_state.ledger import Ledger
from verl_slurm.trainer.models import Models
from verl_slurm.trainer.position import Position, StepShape, rollout_offset
from verl_slurm.trainer.schedule import schedule_record
from verl_slurm.trainer.state import TrainState, capture_state
from verl_slurm.trainer.step import Optimizers

__all__ = ["Checkpointer", "is_due", "live_tensors"]


_ASSURED_KEPT = 2


def is_due(position: Position, config: CheckpointConfig, total_steps: int) -> bool:
    """Whether the plan of saves has one at `position`: every so many whole steps, and at the end."""
    if position.phase != "step_end" or position.step == 0:
        return False
    cadences = (config.every_steps, config.runtime_every_steps)
    return position.step == total_steps or any(position.step % every == 0 for every in cadences)


def live_tensors(models: Models, optimizers: Optimizers) -> dict[str, Tensors]:
    """Every tensor that trains, by domain; they share memory with the models and optimizers."""
    return {
        "actor": model_tensors(models.actor),
        "critic": model_tensors(models.critic),
        "optimizer": optimizer_tensors(
            {"actor": (models.actor, optimizers.actor), "critic": (models.critic, optimizers.critic)}
        ),
    }


class Checkpointer:
    """Saves this run's state and keeps the number of checkpoints in bounds.

    Args:
        epoch_check: raises `Fenced` when another incarnation owns the run.
        resumed_from: name of the checkpoint of this run that was verified and loaded; empty: none.

    Called by: trainer.loop, on every rank.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        paths: RunPaths,
        shape: StepShape,
        models: Models,
        optimizers: Optimizers,
        ranks: Collective,
        ledger: Ledger,
        provenance: Provenance,
        schema: SchemaVersion,
        epoch_check: Callable[[], None],
        resumed_from: str,
    ) -> None:
        self._config, self._paths, self._shape, self._ranks = config, paths, shape, ranks
        self._models, self._optimizers, self._ledger = models, optimizers, ledger
        self._provenance, self._schema, self._epoch_check = provenance, schema, epoch_check
        self._assured = {resumed_from} - {""}
        """Known to be whole without being read: verified before we loaded it, or committed by ourselves."""

    def save(self, state: TrainState) -> SavedCheckpoint:
        """Commit a checkpoint of `state`. Collective.

        Raises:
            RanksFailed: nothing was saved, and nothing of what was saved before is harmed.
        """
        runtime = capture_state(state, self._shape, rank=self._ranks.rank)
        contents = Contents(
            domains=live_tensors(self._models, self._optimizers),
            runtime=runtime,
            texts=self._texts(state) if self._ranks.rank == 0 else {},
        )
        done = save(self._paths, contents, self._provenance, self._ranks, epoch_check=self._epoch_check)
        self._assured.add(done.name)
        return done

    def clean_up(self) -> None:
        """Remove checkpoints beyond `keep_last`, and journal records that no kept one needs. Collective.

        Training waits meanwhile, so no checkpoint is read for it: see `_prune`.

        Raises:
            RanksFailed: some of it could not be removed; nothing that is needed was.
        """
        oldest = msgspec.json.decode(self._ranks.on_first("pruning checkpoints", self._prune), type=int)
        self._ranks.together("pruning the ledger", lambda: self._ledger.compact(oldest))

    def _prune(self) -> bytes:
        """Rank 0's part; returns the step from which on the ledger is still needed.

        What we committed was hashed as it was written, but nobody has read it back yet. So one more that is
        known to be whole must stay beside it before anything older goes, whatever `keep_last` says.
        """
        plan = plan_prune(
            list_checkpoints(self._paths),
            self._config.checkpoint.keep_last,
            verified=self._assured,
            num_verified=_ASSURED_KEPT,
        )
        apply_prune(self._paths, plan)
        kept = [info for info in list_checkpoints(self._paths) if info.kind == "committed"]
        oldest = min((info.step for info in kept), default=0)
        journal.prune(self._paths, oldest, current_epoch=self._provenance.epoch)
        return msgspec.json.encode(oldest)

    def _texts(self, state: TrainState) -> dict[str, bytes]:
        position, train = state.position, self._config.train
        metadata = {
            "step": position.step,
            "phase": position.phase,
            "index": position.index,
            "rollout_offset": rollout_offset(position, self._shape),
            "kl_coef": state.kl.coef,
            "kl_window": len(state.kl.window),
            "schedulers": schedule_record(train, position.step),
            "history": state.history,
        }
        return {
            "scheduler.json": _json(schedule_record(train, position.step)),
            "metadata.json": _json(metadata),
            "config.yaml": dump(self._config),
            "orchestration.json": Path(self._paths.orchestration).read_bytes(),
            SCHEMA_VERSION: render_schema(self._schema),
        }


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
