"""Makes verl's PPO trainers interruptible through verl's own extension points; verl itself loads it.

`VERL_USE_EXTERNAL_MODULES=verl_slurm.loops.verl.verl_ppo` makes every process of verl's import this at the end of
`import verl`. `register_trainer` registers two names, and `trainer.v1.trainer_mode` selects one of them: verl's own
class, which may save and leave at the end of a step.

Our methods are those that verl calls for its subclasses, and around two of its replay buffer's. A recipe with a main of
its own names verl's classes and derives from them: below it, ours stand under verl's own names.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from typing import Any

import transfer_queue as tq
from omegaconf import open_dict
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import assign_non_tensor_stack

from verl_slurm.loops.rendezvous.everywhere import install_everywhere
from verl_slurm.loops.session import Session
from verl_slurm.loops.step_end import StepEndSaver
from verl_slurm.loops.verl.verl_engines import Engines
from verl_slurm.loops.verl.verl_ppo_rollouts import Recording, Rollouts
from verl_slurm.loops.verl.verl_ppo_saves import Saves
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.verl.positions import POSITION
from verl_slurm.verl.releases import installed_verl
from verl_slurm.verl.tracker import tracker_file
from verl_slurm.wire.environment import RECIPE_VARIABLE

install_everywhere()  # already installed, unless a PYTHONPATH of the user's own has replaced ours


class _LeftEarly(Exception):
    """Ends verl's loop in the middle of a step, from within its wait for responses."""


class _AsItWas:
    """verl's data loader at an earlier moment, for a save."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


_Verls: Any = object
"""What verl's trainers bring to the class below, of which no type is known."""


class _Interruptible(_Verls):  # type: ignore[misc]
    """The hooks that verl calls in its loop; placed before verl's own class in the method resolution order."""

    mode = ""
    saves: Saves
    rollouts: Rollouts
    train_dataloader: Any
    global_steps: int
    total_training_steps: int
    _data_state: dict[str, Any]
    _engines: Engines | None = None
    _sampling_weights: int

    def __init__(self, config: Any) -> None:
        # Before the base class: verl's replay buffer and transfer queue look for its own name of the mode.
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.mode
        libraries = {name: version(name) for name in ("torch", "ray", "transformers")}
        saver = StepEndSaver(
            Session.open(rank=0, world_size=1, lifeline=False),
            Collective(None),
            guest="verl",
            # The files are one per GPU worker; the saver itself speaks as one rank.
            world_size=config.trainer.nnodes * config.trainer.n_gpus_per_node,
            metadata={"verl": installed_verl(), **libraries},
            texts=lambda step: {**tracker_file(step), **self.rollouts.texts(step)},
            # verl dies of a full disk, and its steps take minutes, beside which a commit can run.
            beside=True,
            any_ranks=True,
        )
        self.saves = Saves(saver)
        self.rollouts = Rollouts(saver.session, batch_size=config.data.train_batch_size)
        if saver.session.has_run and config.actor_rollout_ref.rollout.name == "vllm":
            # Here alone: it imports vLLM, as verl's own next line does.
            import_module("verl_slurm.loops.verl.verl_vllm").register()
        super().__init__(config)

    def on_init_end(self) -> None:
        self._sampling_weights = self.global_steps
        super().on_init_end()

    def on_train_begin(self) -> None:
        # verl's loop also ends with the epochs, and then does not know that the previous step was its last.
        within = self.config.trainer.total_epochs * self.steps_per_epoch
        self.total_training_steps = min(self.total_training_steps, within)
        # verl has loaded the checkpoint by now, and `global_steps` names the step that comes next.
        self.saves.begin(self.global_steps - 1, self.total_training_steps)
        super().on_train_begin()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        # verl fills this map while the step runs; a save reads what is in it by then.
        self.saves.numbers(metrics)
        return super().step(metrics, timing_raw)

    def _fetch_one_gen_batch(self) -> Any:
        """Fetches prompts from the data, as verl does, and gives each its position."""
        batch = super()._fetch_one_gen_batch()
        assign_non_tensor_stack(batch, POSITION, self.rollouts.positions(list(batch["uid"])))
        return batch

    def _balance_batch(self, batch: Any, *args: Any, **named: Any) -> Any:
        # verl's order is that in which responses have ended, which no restart repeats. The batch is cut into
        # mini-batches in this order.
        batch.reorder(self.rollouts.order(batch.keys))
        return super()._balance_batch(batch, *args, **named)

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        wait, sample = getattr(buffer, "_wait_for_next_poll", None), buffer.sample
        # A sampler of the user's own may wait in another way: then a step is left at its end alone.
        if wait is None:
            return buffer

        def wait_or_leave(partition_id: str, *args: Any) -> Any:
            if isinstance(self.agent_loop_manager, Recording):
                self.agent_loop_manager.require_workers()
            if partition_id == "train":
                self._leave_if_asked()
            else:
                open_keys = (buffer.pending_keys, buffer.running_keys)
                self.saves.validates(*(len(keys[partition_id]) for keys in open_keys))
            if self._engines is not None:
                self._engines.poll(self._sampling_weights)
            return wait(partition_id, *args)

        def sample_all(*args: Any, **named: Any) -> Any:
            sampled = sample(*args, **named)
            if self._engines is not None:
                self._engines.sampled()
            return sampled

        buffer._wait_for_next_poll, buffer.sample = wait_or_leave, sample_all
        return buffer

    def _validate(self) -> Any:
        session = self.saves.saver.session
        since = session.clock()
        found = super()._validate()
        # verl's step ends only after its validation.
        session.leave_out(since)
        return found

    def _note(self) -> None:
        """Notes which prompts a checkpoint of this step's end leaves open. Cheap, and the same when it is repeated."""
        # `sync` keeps no prompt beyond its step.
        kept = {} if self.mode == "sync" else (tq.kv_list("train") or {}).get("train", {})
        self.rollouts.note(self.global_steps, {uid for uid, tag in kept.items() if tag.get("is_prompt")})

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        # `colocate_async`: its queue holds prompts that were given out since, and would have to be saved as it was.
        # Later samples of a step that has several are made after an update.
        self.saves.saver.leaves_early = self.mode == "sync" and self.local_trigger_step == 0

    def on_sample_end(self) -> None:
        if self.saves.saver.leaves_early:
            # Last chance: from here on the weights change.
            self._leave_if_asked()
            self.saves.saver.leaves_early = False
        super().on_sample_end()

    def _leave_if_asked(self) -> None:
        saves, before = self.saves, self.global_steps - 1
        if saves.saver.leaves_early and saves.leave_early(before, self._save_step_before):
            open_keys = (self.replay_buffer.pending_keys, self.replay_buffer.running_keys)
            self.rollouts.say_left(self.global_steps, sum(len(keys["train"]) for keys in open_keys))
            raise _LeftEarly

    def _save_step_before(self) -> None:
        """Has verl write the state at the end of the last step, while the next one is being sampled."""
        if isinstance(self.agent_loop_manager, Recording):
            # Responses that are broken off below come back like finished ones.
            self.agent_loop_manager.stop()
        # verl's own order before it uses the GPUs for anything else.
        self.checkpoint_manager.abort_replicas()
        self.checkpoint_manager.sleep_replicas()
        now = self.global_steps, self.train_dataloader
        # The prompts of the running step are given out again.
        self.global_steps, self.train_dataloader = self.global_steps - 1, _AsItWas(self._data_state)
        try:
            super()._save_checkpoint()
        finally:
            self.global_steps, self.train_dataloader = now

    def on_step_end(self) -> None:
        # Before the next step takes prompts.
        self._data_state = self.train_dataloader.state_dict()
        self._note()
        if isinstance(self.agent_loop_manager, Recording):
            self.rollouts.step_end(self.agent_loop_manager)
        if self.saves.step_end(self.global_steps, super()._save_checkpoint):
            self.total_training_steps = self.global_steps  # the loop's own condition ends it
            # No validation: it would run in the grace period, after the save.
            self.config.trainer.test_freq = -1
            return  # skips sending weights to the rollout engines: no more sampling follows
        self._sampling_weights = self.global_steps
        super().on_step_end()

    def _save_checkpoint(self) -> None:
        self._note()
        self.saves.save(self.global_steps, super()._save_checkpoint)

    def _compute_metrics(
        self, batch: Any, metrics: Mapping[str, object], *args: object, **named: object
    ) -> None:
        super()._compute_metrics(batch, metrics, *args, **named)
        # After verl's own: from here on the step's numbers are complete.
        self.saves.step_done(self.global_steps, metrics)

    def fit(self, agent_loop_manager: Any) -> None:
        """Runs verl's loop, then judges the step that it reached rather than its having ended."""
        # verl has loaded its checkpoint, and has not asked for a prompt.
        self.rollouts.resume(self.global_steps)
        if not isinstance(agent_loop_manager, Recording):
            self.rollouts.say_what_is_lost(type(agent_loop_manager).__name__)
        elif all(hasattr(replica, "watch") for replica in self.llm_server_manager.get_replicas()):
            self._engines = Engines(self.llm_server_manager, self.checkpoint_manager, self.rollouts.tell)
            agent_loop_manager.wait_for_engines()
        with suppress(_LeftEarly):
            super().fit(agent_loop_manager)
        if not self.config.trainer.get("val_only", False):
            self.saves.end(self.global_steps - 1)


@register_trainer("verl_slurm_sync")
class InterruptibleSync(_Interruptible, PPOTrainerSync):  # type: ignore[misc]
    """`trainer_mode: sync`: sampling and training take turns."""

    mode = "sync"


@register_trainer("verl_slurm_colocate_async")
class InterruptibleColocateAsync(_Interruptible, PPOTrainerColocateAsync):  # type: ignore[misc]
    """`trainer_mode: colocate_async`: unfinished samples continue with the next weights."""

    mode = "colocate_async"


def _take_verls_names(*trainers: type[_Interruptible]) -> None:
    for ours in trainers:
        verls = ours.__mro__[2]
        TRAINER_REGISTRY[ours.mode] = ours
        # Where the class is defined, and in the package from which recipes import it.
        for module in (verls.__module__, "verl.trainer.ppo.v1"):
            setattr(sys.modules[module], verls.__name__, ours)


if os.environ.get(RECIPE_VARIABLE):
    _take_verls_names(InterruptibleSync, InterruptibleColocateAsync)
