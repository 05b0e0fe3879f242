"""Makes verl's PPO trainers interruptible through verl's own extension points; verl itself loads it.

`VERL_USE_EXTERNAL_MODULES=verl_slurm.loops.verl_ppo` makes every process of verl's import this at the end of `import
verl`. `register_trainer` registers two names, and `trainer.v1.trainer_mode` selects one of them: verl's own class,
which may save and leave at the end of a step.

verl uses the name of the mode for more than the choice of the trainer: the replay buffer and the transfer queue ask for
the name "sync", too. So the name is set back before verl's constructor sees it.

Nothing of verl is replaced: our methods are those that verl calls for its subclasses.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from omegaconf import open_dict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_slurm.loops.session import Session
from verl_slurm.loops.step_end import StepEndSaver
from verl_slurm.loops.verl_ppo_saves import Saves
from verl_slurm.rendezvous.everywhere import install_everywhere
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.verl.releases import installed_verl
from verl_slurm.verl.tracker import tracker_file

install_everywhere()  # already installed, unless a PYTHONPATH of the user's own has replaced ours

__all__ = ["InterruptibleColocateAsync", "InterruptibleSync"]


class _Interruptible:
    """The hooks that verl calls in its loop; placed before verl's own class in the method resolution order."""

    mode = ""
    saves: Saves
    config: Any
    global_steps: int
    total_training_steps: int
    steps_per_epoch: int

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
            texts=tracker_file,
            # verl dies of a full disk, and its steps take minutes, beside which a commit can run.
            beside=True,
        )
        self.saves = Saves(saver)
        super().__init__(config)  # type: ignore[call-arg]

    def on_train_begin(self) -> None:
        # verl's loop also ends with the epochs, and then does not know that the previous step was its last.
        within = self.config.trainer.total_epochs * self.steps_per_epoch
        self.total_training_steps = min(self.total_training_steps, within)
        # verl has loaded the checkpoint by now, and `global_steps` names the step that comes next.
        self.saves.begin(self.global_steps - 1, self.total_training_steps)
        super().on_train_begin()  # type: ignore[misc]

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        # verl fills this map while the step runs; a save reads what is in it by then.
        self.saves.numbers(metrics)
        return super().step(metrics, timing_raw)  # type: ignore[misc]

    def on_step_end(self) -> None:
        if self.saves.step_end(self.global_steps, super()._save_checkpoint):  # type: ignore[misc]
            self.total_training_steps = self.global_steps  # the loop's own condition ends it
            # No validation: it would run in the grace period, after the save.
            self.config.trainer.test_freq = -1
            return  # skips sending weights to the rollout engines: no more sampling follows
        super().on_step_end()  # type: ignore[misc]

    def _save_checkpoint(self) -> None:
        self.saves.save(self.global_steps, super()._save_checkpoint)  # type: ignore[misc]

    def _compute_metrics(
        self, batch: Any, metrics: Mapping[str, object], *args: object, **named: object
    ) -> None:
        super()._compute_metrics(batch, metrics, *args, **named)  # type: ignore[misc]
        # After verl's own: from here on the step's numbers are complete.
        self.saves.step_done(self.global_steps, metrics)

    def fit(self, agent_loop_manager: Any) -> None:
        """Runs verl's loop, then judges the step that it reached rather than its having ended."""
        super().fit(agent_loop_manager)  # type: ignore[misc]
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
