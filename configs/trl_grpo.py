"""TRL's `GRPOTrainer` that survives what Slurm does to it: three lines of it are verl-slurm's (marked).

A small GPT-2 learns to say odd numbers, data-parallel over the ranks. Each set of completions serves twelve optimizer
steps. Stopped among them, the run goes on with the same completions. Run it under verl-slurm:

    verl-slurm submit configs/trl_grpo.yaml

or by hand: `python configs/trl_grpo.py`, where it is a Trainer like any other. Needs `trl`.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from verl_slurm.loops.huggingface import VerlSlurmCallback  # 1

WORDS = ["<pad>", "<eos>", *map(str, range(62))]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


class Odd:
    """The reward: how many of the numbers are odd. Keeps a line of JSON for each completion, if told where."""

    __name__ = "odd"

    def __init__(self, samples: Path | None) -> None:
        self._samples = samples / f"rank_{os.environ.get('RANK', '0')}.jsonl" if samples else None

    def __call__(self, prompts: list[str], completions: list[str], **_: object) -> list[float]:
        if self._samples is not None:
            with self._samples.open("a") as lines:
                lines.writelines(json.dumps(pair) + "\n" for pair in zip(prompts, completions, strict=True))
        return [float(sum(int(word) % 2 for word in text.split())) for text in completions]


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
    parser.add_argument(
        "--samples", type=Path, help="a directory for all that is sampled, a file for each rank"
    )
    parser.add_argument("--output-dir", default="runs/trl_grpo-output")
    options = parser.parse_args()
    service = VerlSlurmCallback()  # 2: early, for it tells the daemon that this rank lives
    set_seed(0)
    gpu = torch.cuda.is_available()
    shape = GPT2Config(vocab_size=len(WORDS), n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=1)
    trainer = GRPOTrainer(
        GPT2LMHeadModel(shape),
        Odd(options.samples),
        args=GRPOConfig(
            options.output_dir,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            num_generations=4,
            steps_per_generation=6,
            num_iterations=2,
            max_completion_length=8,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",  # checkpoint.every_steps says how often
            gradient_checkpointing=False,
            use_cpu=not gpu,
            bf16=gpu,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{at} {(at + 2) % 60}" for at in range(60)]}),
        processing_class=tokenizer(),
        callbacks=[service, Slow(options.pause)],
    )
    output = service.train(trainer)  # 3: in place of trainer.train()
    if trainer.is_world_process_zero():  # only a run that is done comes here
        print(f"done: {output.global_step} steps")


if __name__ == "__main__":
    main()
