"""What a checkpoint of this trainer consists of, and what is cleaned up after it."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import msgspec
from torch import nn
from torch.optim import Optimizer

from verl_slurm.base.bounded import DATA_FILES, read_regular
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.best import metrics_of
from verl_slurm.checkpoint.decide.storage import need_of_next
from verl_slurm.checkpoint.format.components import Components
from verl_slurm.checkpoint.format.specification import CHAT_TEMPLATE, SCHEMA_VERSION
from verl_slurm.checkpoint.format.state_schema import SchemaVersion, render_schema
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.pruning import Removing, prune_as_configured
from verl_slurm.config.load import dump
from verl_slurm.config.schema import RunConfig
from verl_slurm.runtime_state.format import RuntimeState
from verl_slurm.runtime_state.ledger import Ledger, prune as prune_ledger
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.save.ranks.saver import CheckpointSaver, SaveContents, SavedCheckpoint
from verl_slurm.save.ranks.tensors import Tensors, model_tensors, optimizer_tensors
from verl_slurm.trainer.learner import Optimizers
from verl_slurm.trainer.measures import console
from verl_slurm.trainer.models import Models
from verl_slurm.trainer.objective.optimizers import schedule_record
from verl_slurm.trainer.state.position import StepShape, rollout_offset
from verl_slurm.trainer.state.reward_state import reward_record
from verl_slurm.trainer.state.train_state import TrainState, capture_state


def live_tensors(models: Models, optimizers: Optimizers) -> dict[str, Tensors]:
    """Every tensor that trains, by domain; they share memory with the models and optimizers."""
    # In the order of `Models.trained`, the same on every rank.
    tensors: dict[str, Tensors] = {role: model_tensors(model) for role, model in models.trained.items()}
    parts: dict[str, tuple[nn.Module, Optimizer]] = {
        role: (model, optimizers[role]) for role, model in models.trained.items()
    }
    return tensors | {"optimizer": optimizer_tensors(parts)}


class Checkpointer:
    """Saves this run's state in the background and keeps the number of checkpoints in bounds; on every rank.

    Args:
        resumed_from: name of the checkpoint of this run that was verified and loaded; empty: none.
        keys: what keeps older ones from being removed must be signed with one of them.
        template: the chat template that rendered prompts (`PromptData.template`).
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        paths: RunPaths,
        shape: StepShape,
        rank: int,
        saver: CheckpointSaver,
        ledger: Ledger,
        schema: SchemaVersion,
        attempt: int,
        resumed_from: str,
        keys: Keyring | None = None,
        template: str | None = None,
    ) -> None:
        self._keys, self._template = keys, template
        self._config, self._paths, self._shape, self._rank = config, paths, shape, rank
        self._saver, self._ledger, self._schema, self._attempt = saver, ledger, schema, attempt
        # Now, while shared storage is there: a save to the nodes' own disks must not need it.
        self._orchestration = read_regular(paths.orchestration, DATA_FILES) if rank == 0 else b""
        self._removing = Removing()
        # Known to be whole without being read: verified before we loaded it, or committed by ourselves.
        # Retention keeps ASSURED_KEPT of these, so it drops nothing that might be the last good checkpoint.
        self._assured = {resumed_from} - {""}

    def begin(
        self,
        state: TrainState,
        *,
        tidy: bool,
        seconds_left: float | None = None,
        on_kept: Callable[[SavedCheckpoint], None] | None = None,
        on_part: Callable[[], None] | None = None,
    ) -> "Future[SavedCheckpoint]":
        """Save `state` as it is now; returns at once (`CheckpointSaver.begin`). Collective.

        Args:
            seconds_left: until the ranks must be gone; None: no hurry.
            tidy: afterwards, remove checkpoints beyond `keep_last` and ledger records that no kept one needs.
            on_kept: told when the nodes' disks have it and shared storage has not (`CheckpointSaver.begin`).
            on_part: told when this rank's own files are durable.
        """
        # Captured now, on the main thread: the state moves on while the save is written.
        contents = self._contents(state)
        # Runs on the save's own thread and process group, so that it never mixes with the main thread's collectives.
        then = self._tidy if tidy else self._remember
        return self._saver.begin(contents, then, seconds_left=seconds_left, on_kept=on_kept, on_part=on_part)

    def begin_partial(self, state: TrainState, components: Components) -> "Future[SavedCheckpoint]":
        """Save the tensors of `components` as they are now, to be exported or evaluated. Collective."""
        return self._saver.begin(self._contents(state), self._tidy_partial, components=components)

    def _runtime(self, state: TrainState) -> RuntimeState:
        # All ranks, not the data-parallel ones alone: each rank of a larger replica saves a runtime state, too.
        world_size = self._config.distributed.world_size
        return capture_state(state, self._shape, rank=self._rank, world_size=world_size)

    def close(self, *, hurry: bool = False) -> None:
        """Ends the saver process once no save runs; with `hurry` removals are left to the next start."""
        self._saver.close()
        if not hurry:
            self._removing.close()

    def _remember(self, _: Collective, done: SavedCheckpoint) -> None:
        # A copy on the nodes' disks cannot stand in for an older checkpoint on shared storage.
        if done.on_shared:
            self._assured.add(done.name)

    def _tidy(self, ranks: Collective, done: SavedCheckpoint) -> None:
        """In the background, behind the commit; no checkpoint is read for it: see `_prune`."""
        self._remember(ranks, done)
        if not done.on_shared:
            return  # what is there is all there is
        try:
            # Checkpoints first: the ledger may forget what no kept one needs, never more.
            oldest = ranks.on_first("pruning checkpoints", lambda: self._prune(done), int)
            # Each rank compacts the segment that it writes itself. Segments of former attempts fell to rank 0 in
            # `_prune`.
            ranks.together("pruning the ledger", lambda: self._ledger.compact(oldest))
        except RanksFailed as error:
            # Too many checkpoints harm nobody, but for the room they take.
            if self._rank == 0:
                console.complain(error.one_line())

    def _tidy_partial(self, ranks: Collective, done: SavedCheckpoint) -> None:
        """The same retention; nothing is resumed from these, so the one just written is assurance enough."""
        prune = partial(prune_as_configured, self._paths.partial, self._config.checkpoint, self._removing)
        try:
            ranks.first_does(
                "pruning partial checkpoints", lambda: prune({done.name}, self._keys, partial=True)
            )
        except RanksFailed as error:
            if self._rank == 0:
                console.complain(error.one_line())

    def _prune(self, done: SavedCheckpoint) -> int:
        """Does rank 0's part after the commit of `done`; returns the step from which on the ledger is still needed."""
        check = partial(require_attempt, self._paths, self._attempt)
        config = self._config.checkpoint
        plan = prune_as_configured(
            self._paths, config, self._removing, self._assured, self._keys, attempt_check=check
        )
        # Asked again after the removals, which may take long: a newer attempt may need these records by now.
        require_attempt(self._paths, self._attempt)
        # Listed once more: an entry that the daemon has set aside since the plan holds back no records.
        kept = [info for info in list_checkpoints(self._paths) if info.name in plan.working]
        oldest = min((info.step for info in kept), default=0)
        prune_ledger(self._paths, oldest, current_attempt=self._attempt)
        self._removing.leave_room(self._paths.checkpoints, need_of_next(done.num_bytes, done.num_files))
        return oldest

    def _contents(self, state: TrainState) -> SaveContents:
        return SaveContents(
            runtime=self._runtime(state),
            texts=self._texts(state) if self._rank == 0 else {},
            metrics=_metrics(state),
            # The reward may be another in the next save; a rule has no digest.
            frozen={"reward": state.reward.digest} if state.reward.digest else {},
        )

    def _texts(self, state: TrainState) -> dict[str, bytes]:
        position, train = state.position, self._config.train
        metadata = {
            "step": position.step,
            "phase": position.phase,
            "index": position.index,
            "rollout_offset": rollout_offset(position, self._shape),
            "kl_coef": state.kl.coef,
            "kl_window": len(state.kl.window),
            "reward": reward_record(state.reward, position.step),
            "schedulers": schedule_record(train, position.step),
            "history": state.history,
        }
        return {
            "scheduler.json": _json(schedule_record(train, position.step)),
            "metadata.json": _json(metadata),
            "config.yaml": dump(self._config),
            "orchestration.json": self._orchestration,
            SCHEMA_VERSION: render_schema(self._schema),
            # The text itself: the file or the model that it came from may change or go while the run is kept.
            **(
                {}
                if self._template is None
                else {CHAT_TEMPLATE: self._template.encode("utf-8", "surrogatepass")}
            ),
        }


def _metrics(state: TrainState) -> dict[str, float]:
    """Of the step that has just ended; the weights in the middle of one are not those that the last row is of."""
    whole = state.position.phase == "step_end" and bool(state.history)
    return metrics_of(state.history[-1]) if whole else {}


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
