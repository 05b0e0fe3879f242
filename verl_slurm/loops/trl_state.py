"""The state of TRL's trainers that their checkpoints leave out, for `huggingface`. Needs torch.

GRPO and RLOO sample completions for several optimizer steps at once. Such a cycle is `steps_per_generation *
num_iterations` batches long. TRL 1.16 writes neither the completions nor its place in the cycle to a checkpoint. Left
alone, a resume samples the prompts of the running cycle again and counts its cycles from there. It also begins each
later epoch in the order of the first one: the generator of its sampler starts anew.

```
guest/trl/              in the Trainer's own directory, as `loop_state` writes it: `trainer`, and `reference` where the
                        reference model follows the policy (sync_ref_model)
```

The state `trainer`, of each rank, closed and without a pickle:

```
order         the generator of TRL's sampler at the begin of the epoch that the next step belongs to; None: it has none
step          batches done (`_step`)                                          these three of a trainer with cycles only
cycle         settings that the completions depend on, by name
completions   the batches of the running cycle, tensors on the CPU; None: the next step samples
tokens        `_total_train_tokens`
metrics       mode → name → numbers that were not logged yet
table         the completions that the next log prints (log_completions); None: none, or images among them
```

TRL is not imported here: a trainer is TRL's if one of its classes is.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from verl_slurm.base.errors import ConfigError
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.loops.loop_state import Objects, load_state, split, write_state
from verl_slurm.save.ranks.collective import Collective

_DIRECTORY = "trl"
# Batches of a cycle, by the module whose `_prepare_inputs` the trainer runs. Where another one prepares them, the same
# attributes may mean something else.
_CYCLES: dict[str, Callable[[Any], int]] = {
    "trl.trainer.grpo_trainer": lambda trainer: trainer.args.steps_per_generation * trainer.num_iterations,
    "trl.trainer.rloo_trainer": lambda trainer: trainer.args.steps_per_generation * trainer.num_iterations,
    "trl.trainer.distillation_trainer": lambda trainer: trainer.args.gradient_accumulation_steps,
}
_SETTINGS = (
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)


class TrlState:
    """See the module. Of one trainer of TRL's, on every rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        prepared_by = getattr(type(trainer)._prepare_inputs, "__module__", "")
        self._length = _CYCLES.get(prepared_by) if hasattr(trainer, "_buffered_inputs") else None
        self._saved_order: torch.Tensor | None = None
        self._epoch_order: torch.Tensor | None = None
        self._sampler: torch.Generator | None = None
        self._keeps_completions = True
        # Both follow the trainer to its end; DeepSpeed's parameters are elsewhere (`losses`).
        reference = None if trainer.is_deepspeed_enabled else _reference(trainer)
        self._objects = Objects({"trainer": self, "reference": reference})

    @classmethod
    def of(cls, trainer: Any) -> "TrlState | None":
        """Returns the state of `trainer`; None: it is not TRL's."""
        ours = any(base.__module__.partition(".")[0] == "trl" for base in type(trainer).__mro__)
        return cls(trainer) if ours else None

    def losses(self) -> list[str]:
        """Returns what an interruption costs this trainer although it was saved, for people."""
        trainer, found = self._trainer, []
        name = type(trainer).__name__
        if self._length is None and (
            hasattr(trainer, "_buffered_inputs") or hasattr(trainer, "rollout_queue")
        ):
            found.append(
                f"{name} keeps completions in a way that is not known here: those that were sampled and not trained "
                "on are sampled again after an interruption"
            )
        if trainer.is_deepspeed_enabled and _reference(trainer) is not None:
            found.append(f"the reference model of {name} starts anew after an interruption: DeepSpeed has it")
        if any(hasattr(callback, "ema_params") for callback in trainer.callback_handler.callbacks):
            found.append("the averages of BEMACallback start anew after an interruption")
        return found

    def keep_tables(self, chosen: Path, work: Path) -> None:
        """Leads TRL's tables of completions from `work`, where it writes while it trains, to the user's. Rank 0."""
        # TRL makes the directory with the trainer, and writes to it by the name that the output directory has then.
        if getattr(self._trainer, "log_completions", False):
            (work / "completions").symlink_to((chosen / "completions").absolute(), target_is_directory=True)

    def epoch_begins(self, loader: Any) -> None:
        """Restores the order of the data in the first epoch of a start. Before the first batch of an epoch is drawn."""
        self._sampler = _sampler(loader)
        if self._sampler is None:
            return
        if self._saved_order is not None:
            self._sampler.set_state(self._saved_order)
            self._saved_order = None
        # The permutation of an epoch is drawn once, at its begin: from here it can be drawn again.
        self._epoch_order = self._sampler.get_state()

    def write(self, directory: Path, step: int, ranks: Collective) -> tuple[tuple[FileEntry, ...], str]:
        """Writes this rank's state below `directory`, the Trainer's own. Collective.

        Returns:
            The entries of all ranks' files, relative to `directory`, and why the completions are not among them.

        Raises:
            RanksFailed: some rank could not.
        """
        problem = self._problem()
        # Agreed on: a rank that resumes with completions would wait for one that samples, in TRL's collectives.
        self._keeps_completions = ranks.max([int(bool(problem))]) == [0]
        ranks.first_does("starting the save", lambda: _empty(directory / _DIRECTORY))
        entries = write_state(self._objects, directory, step, ranks, domain=_DIRECTORY)
        return entries, "" if self._keeps_completions else problem or "another rank cannot save its own"

    def load(self, directory: Path, ranks: Collective) -> bool:
        """Restores the state that `write` has written; returns whether there is one. Collective.

        Raises:
            RanksFailed: it does not fit the trainer of some rank.
        """
        if not (directory / _DIRECTORY).is_dir():
            return False
        # In its place in the checkpoint, whose manifest has the digests.
        checkpoint, domain = directory.parent, f"{directory.name}/{_DIRECTORY}"
        reader = ranks.together("reading the state", lambda: CheckpointReader(checkpoint))
        load_state(self._objects, reader, ranks, domain=domain, states=domain)
        return True

    # ---- as `Objects` asks for it

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {
            "order": self._order(),
            "tokens": int(getattr(trainer, "_total_train_tokens", 0)),
            "metrics": {mode: _numbers(rows) for mode, rows in self._modes().items()},
            "table": self._table(),
        }
        if self._length is not None:
            running = trainer._step % self._length(trainer) != 0 and self._keeps_completions
            state |= {
                "step": trainer._step,
                "cycle": self._settings(),
                # At the end of a cycle they have served: the next step samples.
                "completions": trainer._buffered_inputs if running else None,
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        self._saved_order = state["order"]
        if self._length is not None:
            self._require_settings(state)
            trainer._step = state["step"]
            if state["completions"] is not None:
                trainer._buffered_inputs = _moved(state["completions"], trainer.accelerator.device)
        if hasattr(trainer, "_total_train_tokens"):
            trainer._total_train_tokens = state["tokens"]
        for mode, rows in self._modes().items():
            for name, numbers in state["metrics"].get(mode, {}).items():
                rows[name] = list(numbers)  # not added: it may be loaded twice (`auto_find_batch_size`)
        if state["table"] is not None:
            _refill(trainer._logs, state["table"])

    def _modes(self) -> dict[str, Any]:
        """Returns the numbers that were not logged yet, by mode and name."""
        # A trainer that is not known here may have something else by this name, and no save may depend on it.
        found = getattr(self._trainer, "_metrics", None)
        modes = found.items() if isinstance(found, Mapping) else ()
        return {mode: rows for mode, rows in modes if isinstance(rows, Mapping)}

    def _order(self) -> torch.Tensor | None:
        epoch = self._trainer.state.epoch
        # Exact: the Trainer adds 1.0 to the number of the epoch at its last step. The next epoch draws what follows.
        if self._sampler is not None and epoch is not None and math.fmod(epoch, 1.0) == 0.0:
            return self._sampler.get_state()
        return self._epoch_order

    def _settings(self) -> dict[str, int]:
        trainer = self._trainer
        found = {name: getattr(trainer.args, name, None) for name in _SETTINGS}
        return {name: value for name, value in found.items() if value is not None}

    def _require_settings(self, state: Mapping[str, Any]) -> None:
        """Refuses completions of a cycle of another shape: TRL would take the wrong ones, or none."""
        then, now = state["cycle"], self._settings()
        if state["completions"] is None or then == now:
            return
        changed = [name for name in sorted(then | now) if then.get(name) != now.get(name)]
        raise ConfigError(
            "the checkpoint is from the middle of a cycle of completions, and the cycle is another one now",
            found=", ".join(f"{name}={now.get(name)}" for name in changed),
            expected=", ".join(f"{name}={then.get(name)}" for name in changed),
            remedy="set it back, or go on from a checkpoint of a cycle's end",
        )

    def _problem(self) -> str:
        """Returns why the completions of this rank cannot be saved; empty: they can."""
        try:
            split(getattr(self._trainer, "_buffered_inputs", None) if self._length is not None else None)
        except ConfigError as error:
            return error.one_line()
        return ""

    def _table(self) -> Any:
        trainer = self._trainer
        # Without log_completions they are collected all the same, and never read.
        if not getattr(trainer, "log_completions", False):
            return None
        table = _listed(getattr(trainer, "_logs", None))
        try:
            split(table)
        except ConfigError:  # images, or a column of the user's: for people alone, and worth no checkpoint
            return None
        return table


def _reference(trainer: Any) -> torch.nn.Module | None:
    """Returns the reference model that follows the policy; None: there is none, or it stays what it was loaded as."""
    for callback in trainer.callback_handler.callbacks:
        model = getattr(callback, "ref_model", None)
        if type(callback).__module__.partition(".")[0] == "trl" and isinstance(model, torch.nn.Module):
            return model
    return None


def innermost_sampler(loader: Any) -> Any:
    """Returns what gives a loader its indices, below all wrappers; None: there is none."""
    place = loader
    while getattr(place, "batch_sampler", None) is not None:
        place = place.batch_sampler
    return getattr(place, "sampler", None)


def _sampler(loader: Any) -> torch.Generator | None:
    """Returns the generator of TRL's own sampler; None: another one shuffles, by the number of the epoch."""
    sampler = innermost_sampler(loader)
    if type(sampler).__module__.partition(".")[0] != "trl":
        return None
    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _empty(directory: Path) -> None:
    # The Trainer writes into a directory that is there already (transformers 5.10), e.g. after a save that failed.
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)


def _numbers(rows: Mapping[str, Iterable[Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, values in rows.items():
        # For people alone: what is no number is left out.
        with suppress(TypeError, ValueError, RuntimeError):
            found[name] = [value if type(value) in (int, float) else float(value) for value in values]
    return found


def _listed(value: Any) -> Any:
    """Returns the tree with plain maps and lists in place of TRL's defaultdicts and deques."""
    if isinstance(value, Mapping):
        return {name: _listed(inner) for name, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | torch.Tensor):
        return [_listed(inner) for inner in value]
    return value


def _refill(logs: Any, table: Mapping[str, Any]) -> None:
    for name, rows in table.items():
        if isinstance(rows, Mapping):
            _refill(logs[name], rows)
        else:
            logs[name].clear()
            logs[name].extend(rows)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(inner, device) for name, inner in value.items()}
    return type(value)(_moved(inner, device) for inner in value) if type(value) in (list, tuple) else value
