"""A recipe for verl as people write them: a main, a task runner and a trainer of its own, derived from verl's classes.

In the form of verl-recipe's `echo/main_ppo.py`, which insists on `trainer_mode: sync` and names verl's trainer itself.
"""

import os
from typing import Any

import hydra
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, PPOTrainerSync
from verl.utils.device import auto_set_device


class RecipeTrainer(PPOTrainerSync):  # type: ignore[misc]
    def on_step_end(self) -> Any:
        with open(os.environ["VERL_TEST_RECIPE"], "a") as file:
            file.write(f"{self.global_steps}\n")
        return super().on_step_end()


@ray.remote
class RecipeRunner:
    def run(self, config: DictConfig) -> None:
        if config.trainer.v1.trainer_mode != "sync":
            raise ValueError("this recipe supports trainer.v1.trainer_mode=sync only")
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        tq.init(config.transfer_queue)
        try:
            trainer = RecipeTrainer(config=config)
            trainer.init()
            manager = AgentLoopManagerTQ.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            trainer.fit(manager)
        finally:
            tq.close()


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    auto_set_device(config)
    run_ppo(config, task_runner_class=RecipeRunner)


if __name__ == "__main__":
    main()
