"""Scores for whole responses: a verifiable rule, or a Hugging Face sequence classifier."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from verl_slurm.errors import ConfigError, DataError
from verl_slurm.trainer.data import Batch, load_tokenizer
from verl_slurm.trainer.models import load_pretrained

__all__ = [
    "RULES",
    "ClassifierReward",
    "Reward",
    "RuleReward",
    "arithmetic",
    "build_reward",
    "decode_responses",
]


class Reward(Protocol):
    """Obligations: same texts, same scores, bit for bit; no global randomness; finite. Runs on each rank."""

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> Tensor:
        """float32 [N], one score for each response."""


def decode_responses(tokenizer: PreTrainedTokenizerBase, batch: Batch) -> list[str]:
    """The text of each response, without special tokens and padding."""
    known = len(tokenizer)
    texts = []
    for ids, mask in zip(batch["response_ids"], batch["response_mask"], strict=True):
        # A model's vocabulary may be padded beyond its tokenizer's.
        tokens = [token for token in ids[mask].tolist() if token < known]
        texts.append(str(tokenizer.decode(tokens, skip_special_tokens=True)))
    return texts


def arithmetic(response: str, answer: str) -> float:
    """How near the last word of `response` is to the integer `answer`, in [0, 1].

    What comes before the last word is the policy's working, and not judged. 0.1 for any plain integer;
    if it is as long as the answer, up to 0.2 more for the share of characters right at their place; 1.0
    only for the answer itself.
    """
    words = response.split()
    word = words[-1] if words else ""
    if word == answer:
        return 1.0
    if re.fullmatch(r"-?[0-9]+", word) is None:
        return 0.0
    score = 0.1
    if len(word) == len(answer):
        right = sum(a == b for a, b in zip(word, answer, strict=True))
        score += 0.2 * right / len(answer)
    return score


RULES: dict[str, Callable[[str, str], float]] = {"arithmetic": arithmetic}
"""Rules by name, (response, answer) -> score; `model.reward: rule:NAME`."""


class RuleReward:
    """A pure function of response and answer.

    Called by: build_reward.
    """

    def __init__(self, rule: Callable[[str, str], float]) -> None:
        self._rule = rule

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> Tensor:
        scores = [self._rule(response, answer) for response, answer in zip(responses, answers, strict=True)]
        return torch.tensor(scores, dtype=torch.float32)


class ClassifierReward:
    """A sequence classifier with one label: its logit for prompt + response is the score.

    Args:
        directory: Hugging Face model with its own tokenizer.
        batch_size: texts in one forward pass. Rows are scored in the given order.
        device: where to score.

    Raises:
        DataError: nothing to load, or more than one label.

    Called by: build_reward.
    """

    def __init__(self, directory: Path, *, batch_size: int = 64, device: torch.device | None = None) -> None:
        model: Any = load_pretrained(
            AutoModelForSequenceClassification, directory, "model.reward", dtype=torch.float32
        )
        if model.config.num_labels != 1:
            raise DataError(
                "the reward model does not give one score",
                where=directory,
                found=f"{model.config.num_labels} labels",
                expected="1 label",
                remedy="train it with num_labels=1",
            )
        self._tokenizer = load_tokenizer(directory)
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self._tokenizer.pad_token_id
        self._device = device or torch.device("cpu")
        self._model = model.requires_grad_(False).to(self._device)
        self._batch_size = batch_size

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> Tensor:
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        scores = []
        for start in range(0, len(texts), self._batch_size):
            encoded = self._tokenizer(
                texts[start : start + self._batch_size], padding=True, return_tensors="pt"
            ).to(self._device)
            scores.append(self._model(**encoded).logits[:, 0].float().cpu())
        return torch.cat(scores) if scores else torch.zeros(0)


def build_reward(spec: str, *, device: torch.device | None = None) -> Reward:
    """The reward that `model.reward` names: `rule:NAME` or `classifier:DIR`.

    Raises:
        ConfigError: another kind, or no rule of that name.
        DataError: the classifier cannot be loaded.
    """
    kind, _, name = spec.partition(":")
    if kind == "rule" and name in RULES:
        return RuleReward(RULES[name])
    if kind == "classifier" and name:
        return ClassifierReward(Path(name), device=device)
    raise ConfigError(
        "no such reward",
        where="model.reward",
        found=spec,
        expected=f"classifier:DIR or one of {', '.join(f'rule:{rule}' for rule in sorted(RULES))}",
        remedy="set model.reward",
    )
