"""Scores whole responses by a verifiable rule, a Hugging Face sequence classifier, or a user's function."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BatchEncoding, PreTrainedTokenizerBase

from verl_slurm.base.bounded import TOKENIZER, read_regular
from verl_slurm.base.errors import ConfigError, DataError, DatasetDrift
from verl_slurm.config.reward_spec import FORMS, RewardSpec, parse_reward
from verl_slurm.dataset.fingerprint.data_record import fingerprint
from verl_slurm.trainer.data import Batch, begin_token, load_tokenizer
from verl_slurm.trainer.models import load_pretrained
from verl_slurm.trainer.reward.python import load_python_reward
from verl_slurm.trainer.state.pinned_model import pinned_model


class Reward(Protocol):
    """Must give the same bits for the same texts, use no global randomness, and return finite scores.

    Every rank loads it; one of each replica asks it.
    """

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> Tensor:
        """Returns float32 [N], one score for each response."""


def decode_responses(tokenizer: PreTrainedTokenizerBase, batch: Batch) -> list[str]:
    """Returns the text of each response, without special tokens and padding."""
    known = len(tokenizer)
    texts = []
    for ids, mask in zip(batch["response_ids"], batch["response_mask"], strict=True):
        # A model's vocabulary may be padded beyond its tokenizer's.
        tokens = [token for token in ids[mask].tolist() if token < known]
        texts.append(str(tokenizer.decode(tokens, skip_special_tokens=True)))
    return texts


def arithmetic(response: str, answer: str) -> float:
    """Scores how near the last word of `response` is to the integer `answer`, in [0, 1].

    Any plain integer scores 0.1. If it is as long as the answer, it gets up to 0.2 more for the share of
    characters right at their place. Only the answer itself scores 1.0.
    """
    # The last word alone: the policy may write down its working before it.
    words = response.split()
    word = words[-1] if words else ""
    if word == answer:
        return 1.0
    # [0-9]: \d would take digits of other scripts.
    if re.fullmatch(r"-?[0-9]+", word) is None:
        return 0.0
    score = 0.1
    if len(word) == len(answer):
        right = sum(a == b for a, b in zip(word, answer, strict=True))
        score += 0.2 * right / len(answer)
    return score


RULES: dict[str, Callable[[str, str], float]] = {"arithmetic": arithmetic}
"""Maps rule names to functions (response, answer) -> score; `model.reward: rule:NAME`."""


class RuleReward:
    """A pure function of response and answer."""

    def __init__(self, rule: Callable[[str, str], float]) -> None:
        self._rule = rule

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> Tensor:
        scores = [self._rule(response, answer) for response, answer in zip(responses, answers, strict=True)]
        return torch.tensor(scores, dtype=torch.float32)


class ClassifierReward:
    """Scores prompt + response by the logit of a sequence classifier with one label.

    Args:
        directory: Hugging Face model with its own tokenizer.
        batch_size: texts in one forward pass. Rows are scored in the given order.
        digest: of the directory's fingerprint; empty: any.

    Raises:
        DatasetDrift: the directory has another fingerprint, or changes while it is loaded.
        DataError: nothing to load, or more than one label; when called: a score that is not finite.
    """

    def __init__(
        self, directory: Path, *, batch_size: int = 64, device: torch.device | None = None, digest: str = ""
    ) -> None:
        self._directory, self._batch_size = directory, batch_size
        self._device = device or torch.device("cpu")
        if digest:
            # Held to rank 0's digest on each rank, and pinned: files may be swapped before or while they are loaded.
            with pinned_model(directory, _recorded(directory, digest)) as pinned:
                pinned.fill()
                model = self._load(pinned.path)
                pinned.verify()
        else:
            model = self._load(directory)
        # A classifier takes the last token that is no padding, and finds it by this number.
        # The tokenizer's, which pads: config.json may name another one.
        for config in (model.config, model.config.get_text_config()):
            config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.requires_grad_(False).to(self._device)

    def _load(self, path: Path) -> Any:
        model: Any = load_pretrained(
            AutoModelForSequenceClassification, path, "model.reward", dtype=torch.float32
        )
        # Of several logits none is the score.
        if model.config.num_labels != 1:
            raise DataError(
                "the reward model does not give one score",
                where=path,
                found=f"{model.config.num_labels} labels",
                expected="1 label",
                remedy="train it with num_labels=1",
            )
        self._tokenizer = load_tokenizer(path)
        # Loaded tensors are a view of the file; a copy is safe from later writes to it.
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.to(self._device, copy=True)
        # Read with the model: when it is replaced, the directory may hold something else.
        names = ("tokenizer_config.json", "config.json")
        self._texts = {
            name: read_regular(path / name, TOKENIZER, follow=True)
            for name in names
            if (path / name).is_file()
        }
        return model

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> Tensor:
        # The raw texts: the reward model's own tokenizer cuts them, not the policy's.
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        scores = []
        for start in range(0, len(texts), self._batch_size):
            encoded = self._encoded(texts[start : start + self._batch_size]).to(self._device)
            self._require_short(encoded["input_ids"].shape[1])
            # In the given order and in fixed batches: rounding depends on the batch.
            scores.append(self._model(**encoded).logits[:, 0].float().cpu())
        whole = torch.cat(scores) if scores else torch.zeros(0)
        if not bool(whole.isfinite().all()):  # one NaN would spoil the weights permanently
            wrong = int(whole.isfinite().logical_not().nonzero()[0])
            raise DataError(
                "the reward model gives something that is no reward",
                where=self._directory,
                found=f"{float(whole[wrong])} for prompt {prompts[wrong][:60]!r}, response {responses[wrong][:60]!r}",
                expected="a finite number",
                remedy="correct the reward model, or set model.reward",
            )
        return whole

    def _encoded(self, texts: list[str]) -> BatchEncoding:
        """Returns a padded batch; where the tokenizer puts a BOS before a text, there is one."""
        encoded = self._tokenizer(texts)
        # A chat template has written a BOS already, and no classifier was trained on two.
        if (begin := begin_token(self._tokenizer)) is not None:
            twice = [ids[:2] == [begin, begin] for ids in encoded["input_ids"]]
            for name, rows in encoded.items():
                encoded[name] = [row[double:] for row, double in zip(rows, twice, strict=True)]
        return self._tokenizer.pad(encoded, return_tensors="pt")

    def _require_short(self, length: int) -> None:
        """Raises `DataError` for a text that is longer than the model's position embeddings."""
        limits = [
            # Some classes keep the first rows for themselves: by an offset (OPT), or up to the padding (RoBERTa).
            module.num_embeddings
            - getattr(module, "offset", 0)
            - (0 if module.padding_idx is None else module.padding_idx + 1)
            for name, module in self._model.named_modules()
            if isinstance(module, torch.nn.Embedding) and ("position" in name or name.endswith("wpe"))
        ]
        # Beyond them a GPU would end with an assert.
        if limits and length > min(limits):
            raise DataError(
                "a prompt with its response is too long for the reward model",
                where=f"model.reward, {self._directory}",
                found=f"{length} tokens",
                expected=f"at most {min(limits)}, for which it has position embeddings",
                remedy="lower data.max_prompt_tokens or rollout.max_new_tokens, or set another model.reward",
            )

    def light(self) -> dict[str, bytes]:
        """Returns what tells this model from others on its backbone: its head, its tokenizer's configuration."""
        backbone = self._model.base_model_prefix + "."
        # The backbone is left out: RUN/frozen has the whole model.
        head = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in self._model.state_dict().items()
            if not name.startswith(backbone)
        }
        return {"head.safetensors": safetensors.torch.save(head)} | self._texts


def _recorded(directory: Path, digest: str) -> dict[str, str]:
    """Returns the SHA-256 of each file of a directory that has this fingerprint."""
    seen = fingerprint(directory)
    if seen.digest != digest:
        raise DatasetDrift(
            "the reward model is not the one that was fingerprinted",
            where=directory,
            found=seen.digest[:16],
            expected=digest[:16],
            remedy="restore it, and see who else may write there",
        )
    return seen.digests()


def build_reward(text: str, *, device: torch.device | None = None, digest: str = "") -> Reward:
    """Builds the reward that `model.reward` names (`config.reward_spec`).

    Args:
        digest: that the source of a `python:` reward, or a classifier's directory, must have; empty: any.

    Raises:
        ConfigError: another kind, no rule of that name, no such module or function.
        DataError: the classifier or the source cannot be loaded, or the source is another.
    """
    spec = parse_reward(text)
    match spec:
        # A rule is code of this package: it has no digest of its own.
        case RewardSpec("rule", name) if name in RULES:
            return RuleReward(RULES[name])
        case RewardSpec("classifier", name):
            return ClassifierReward(Path(name), device=device, digest=digest)
        case RewardSpec("python"):
            return load_python_reward(spec, digest)
        case _:
            raise ConfigError(
                "no such reward",
                where="model.reward",
                found=text,
                expected=f"{FORMS}; rules: {', '.join(f'rule:{rule}' for rule in sorted(RULES))}",
                remedy="set model.reward",
            )
