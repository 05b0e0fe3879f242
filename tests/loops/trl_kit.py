"""Tiny runs of TRL's trainers: a word-level tokenizer, a model of one layer, and a record of all that is sampled."""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    set_seed,
)
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from verl_slurm.loops.huggingface import VerlSlurmCallback
from verl_slurm.loops.session import Session

# TRL tells its authors of each trainer that is made, and asks the Hub for each model's name.
os.environ["HF_HUB_OFFLINE"] = "1"
disable_progress_bars()
# For tensors as small as these: on a busy machine a second thread costs more than half of the time.
torch.set_num_threads(1)

WORDS = ["<pad>", "<eos>", *map(str, range(30))]

Sampled = list[tuple[str, str]]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def model() -> GPT2LMHeadModel:
    set_seed(3)
    shape = GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )
    return GPT2LMHeadModel(shape)


@dataclass
class Life:
    """One attempt: what it was told to do, and what came of it.

    Attributes:
        sampled: prompt and completion of each sample, in the order in which they were scored.
    """

    session: Session
    trainer: Trainer
    sampled: Sampled = field(default_factory=list)
    stopped: bool = False

    def train(self) -> "Life":
        service = VerlSlurmCallback(self.session)
        if self.session.resume is not None:
            # Whatever comes of the generators' places by then: a program may draw from them at each start.
            torch.rand(7), np.random.rand(7), random.random()
        try:
            service.train(self.trainer)
        except SystemExit as leave:
            self.stopped = leave.code == 0
        return self

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.trainer.model.parameters()])


def logged(life: Life) -> list[dict[str, float]]:
    """What it logged, but for the Trainer's sum of the loss, which begins anew, and for what the clock said."""
    other = ("loss", "step_time", "train_")
    return [
        {name: number for name, number in row.items() if not name.startswith(other)}
        for row in life.trainer.state.log_history
    ]


def _common(session: Session) -> dict[str, Any]:
    out = str(session.paths.root / "out") if session.has_run else "out"
    return {
        "output_dir": out,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "learning_rate": 1e-2,
    }


def online(
    session: Session,
    kind: type[Any] = GRPOTrainer,
    *,
    prompts: int = 24,
    policy: Any = None,
    more: Any = (),
    **settings: Any,
) -> Life:
    """GRPO or RLOO: two prompts a batch, two samples each."""
    sampled: Sampled = []

    def odd(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        sampled.extend(zip(prompts, completions, strict=True))
        return [float(sum(int(word) % 2 for word in text.split())) for text in completions]

    words = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 5,
        **_common(session),
        **settings,
    }
    config = RLOOConfig if issubclass(kind, RLOOTrainer) else GRPOConfig
    trainer = kind(
        model() if policy is None else policy,
        odd,
        args=config(**words),
        train_dataset=Dataset.from_dict({"prompt": [f"{at} {at + 1} {at + 2}" for at in range(prompts)]}),
        processing_class=tokenizer(),
        callbacks=list(more),
    )
    return Life(session, trainer, sampled)


def sft(session: Session, **settings: Any) -> Life:
    rows = [" ".join(str((at + by) % 30) for by in range(2 + at % 6)) for at in range(20)]
    config = SFTConfig(**{"per_device_train_batch_size": 4, **_common(session), **settings})
    data = Dataset.from_dict({"text": rows})
    return Life(session, SFTTrainer(model(), config, train_dataset=data, processing_class=tokenizer()))


def dpo(session: Session, where: Path, **settings: Any) -> Life:
    """`where`: of the model's files, from which DPO loads its reference."""
    rows = [
        {"prompt": f"{at} {at + 1}", "chosen": f"{at + 2} {at + 3}", "rejected": f"{at} {(7 * at) % 30}"}
        for at in range(20)
    ]
    return _offline(DPOTrainer, DPOConfig, session, str(where), rows, settings)


def kto(session: Session, where: Path, **settings: Any) -> Life:
    rows = [
        {"prompt": f"{at} {at + 1}", "completion": f"{at + 2}", "label": bool(at % 2)} for at in range(20)
    ]
    return _offline(KTOTrainer, KTOConfig, session, str(where), rows, settings)


def reward(session: Session, where: Path, **settings: Any) -> Life:
    rows = [{"chosen": f"{at} {at + 1}", "rejected": f"{at} {at + 2}"} for at in range(20)]
    set_seed(3)
    scorer = GPT2ForSequenceClassification.from_pretrained(where, num_labels=1, pad_token_id=0)
    return _offline(RewardTrainer, RewardConfig, session, scorer, rows, settings)


def distillation(session: Session, where: Path, **settings: Any) -> Life:
    student = model()
    torch.nn.init.normal_(student.transformer.wte.weight)
    rows = [{"prompt": f"{at} {at + 1}"} for at in range(20)]
    settings = {"gradient_accumulation_steps": 2, "max_completion_length": 5, **settings}
    teacher = GPT2LMHeadModel.from_pretrained(where)
    return _offline(
        DistillationTrainer, DistillationConfig, session, student, rows, settings, teacher_model=teacher
    )


def _offline(
    kind: Any, config: Any, session: Session, policy: Any, rows: list[Any], settings: Any, **more: Any
) -> Life:
    args = config(**{"per_device_train_batch_size": 4, **_common(session), **settings})
    data = Dataset.from_list(rows)
    return Life(session, kind(policy, args=args, train_dataset=data, processing_class=tokenizer(), **more))
