"""A Hugging Face `Trainer` that survives what Slurm does to it: three lines of it are verl-slurm's (marked).

A small GPT-2 learns to count, data-parallel over the ranks. Run it under verl-slurm:

    verl-slurm submit configs/huggingface_trainer.yaml

or by hand: `python configs/huggingface_trainer.py`, where it is a Trainer like any other. Needs `accelerate`.
"""

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from verl_slurm.loops.huggingface import VerlSlurmCallback  # 1

VOCABULARY, LENGTH = 64, 16


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers that go up by one to seven, from anywhere: [LENGTH] each."""

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = (index + (1 + index % 7) * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": numbers, "labels": numbers}


class Slow(TrainerCallback):
    """Steps as long as you like to watch them."""

    def __init__(self, pause: float) -> None:
        self._pause = pause

    def on_step_begin(self, *_: object, **__: object) -> None:
        time.sleep(self._pause)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes besides")
    parser.add_argument("--output-dir", default="runs/huggingface_trainer-output")
    options = parser.parse_args()
    service = VerlSlurmCallback()  # 2: early, for it tells the daemon that this rank lives
    set_seed(0)
    shape = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    trainer = Trainer(
        GPT2LMHeadModel(shape),
        TrainingArguments(
            options.output_dir,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            logging_steps=5,
            save_strategy="no",  # checkpoint.every_steps says how often
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Counting(),
        callbacks=[service, Slow(options.pause)],
    )
    output = service.train(trainer)  # 3: in place of trainer.train()
    if trainer.is_world_process_zero():  # only a run that is done comes here
        print(f"done: {output.global_step} steps")


if __name__ == "__main__":
    main()
