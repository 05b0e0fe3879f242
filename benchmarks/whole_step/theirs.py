"""One rank of TRL's GRPOTrainer: `python -m benchmarks.whole_step.theirs SETTINGS SOCKET`.

TRL's own defaults, but for what `Settings` fixes and for what would make it slower or another job: no bfloat16, no
gradient checkpointing (both are its defaults), no shuffling, no log to anywhere, one log of its metrics a step.
One of our steps is `updates` of what TRL calls a step: it samples once for all of them, all at once.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.whole_step.gate import Gate, Said, Settings
from verl_slurm.config.schema import DataConfig
from verl_slurm.trainer.data import read_sides
from verl_slurm.trainer.reward.scoring import arithmetic


def arguments(given: Settings) -> dict[str, Any]:
    """Of `GRPOConfig`."""
    return {
        "output_dir": given.directory,
        "max_steps": given.steps * given.updates,
        "per_device_train_batch_size": given.mini,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": given.updates,
        "num_iterations": 1,
        "num_generations": given.group,
        "max_completion_length": given.max_new_tokens,
        "temperature": given.temperature,
        "beta": given.beta,
        "epsilon": given.clip,
        "learning_rate": given.learning_rate,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_steps": given.updates,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def _reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [arithmetic(response, right) for response, right in zip(completions, answer, strict=True)]


class _Timed(GRPOTrainer):  # type: ignore[misc]  # no types
    """Takes the time of sampling and of scoring; the update is the rest of the step."""

    generate_s = score_s = reward = 0.0
    tokens = 0

    def _generate(self, prompts: list[Any]) -> Any:
        began = time.perf_counter()
        made = super()._generate(prompts)
        self.generate_s = time.perf_counter() - began
        self.tokens = sum(len(ids) for ids in made[1])
        return made

    def _calculate_rewards(self, *given: Any) -> Any:
        rewards = super()._calculate_rewards(*given)
        self.reward = float(rewards.mean())
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        self.score_s = time.perf_counter() - began - self.generate_s
        return made


class _StepEnd(TrainerCallback):
    """At the gate behind the last update of each step."""

    trainer: _Timed

    def __init__(self, gate: Gate, updates: int) -> None:
        self._gate, self._updates, self._since = gate, updates, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates:
            return
        done, spent = self.trainer, time.perf_counter() - self._since
        said = Said(
            tokens=done.tokens,
            generate_s=done.generate_s,
            score_s=done.score_s,
            update_s=spent - done.generate_s - done.score_s,
            reward=done.reward,
        )
        self._gate.wait(said)
        self._since = time.perf_counter()


def main(given: Settings, socket: Path) -> None:
    torch.set_num_threads(given.threads)
    gate = _StepEnd(Gate(socket), given.updates)
    rows, _ = read_sides(Path(given.data), DataConfig(root=given.data))
    trainer = gate.trainer = _Timed(
        model=given.model,
        reward_funcs=_reward,
        args=GRPOConfig(**arguments(given)),
        train_dataset=Dataset.from_list([{"prompt": prompt, "answer": answer} for prompt, answer in rows]),
        processing_class=AutoTokenizer.from_pretrained(given.model, padding_side="left"),
        callbacks=[gate],
    )
    dtypes = {p.dtype for model in (trainer.model, trainer.ref_model) for p in model.parameters()}
    assert dtypes == {torch.float32}, dtypes
    trainer.train()


if __name__ == "__main__":
    # `datasets` pickles what it fingerprints, and a class of __main__ by value, with all that it refers to.
    from benchmarks.whole_step import theirs

    theirs.main(Settings.parse(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
