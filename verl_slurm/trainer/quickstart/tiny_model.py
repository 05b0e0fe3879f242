"""The built-in model: a tiny Qwen2 that has seen sums and half learned them.

Nothing is downloaded. A byte-level tokenizer without merges (259 tokens) and a two-layer model get a short supervised
warm start on noisy sums. So PPO starts from a policy that answers in the right form and is sometimes right, and the
reward climbs from the first step. With one thread the weights are the same bits on every start of the same machine.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers  # type: ignore[import-untyped]
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging as hf_logging

from verl_slurm.trainer.quickstart import build_once
from verl_slurm.trainer.quickstart.arithmetic_data import sums

_SEED = 20260101
_PROMPT_WIDTH = 6
_RESPONSE_WIDTH = 10
_ANSWER_STARTS = 12
_WARM_STEPS = 500
_WARM_BATCH = 64
_WARM_LR = 4e-3
_NOISE = 0.5
"""Share of the answers' digits that the warm start replaces at random, for PPO to unlearn."""


def _tokenizer() -> PreTrainedTokenizerBase:
    # One token per byte. AutoTokenizer loads any tokenizer of a qwen2 directory as Qwen2Tokenizer, which is byte-level
    # BPE. It would silently misread a character-level vocabulary.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate(alphabet + special)}
    pad, start, end = special
    names: dict[str, Any] = {"unk_token": None, "bos_token": None, "eos_token": end, "pad_token": pad}
    return Qwen2Tokenizer(vocab=vocab, merges=[], additional_special_tokens=[start], **names)


def _config(tokenizer: PreTrainedTokenizerBase, head_dim: int = 16) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=264,
        hidden_size=4 * head_dim,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


@contextlib.contextmanager
def _reproducible() -> Iterator[None]:
    """Sets one thread and deterministic kernels, and restores the caller's random state."""
    threads = torch.get_num_threads()
    strict, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    # With more, sums would be in another order on a machine with other cores: other weights for the same seed.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        # The caller's generators stay where they are.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=warn)


def worked(prompt: str, answer: str) -> str:
    """Returns the response that the warm start teaches: column sums, then the answer, "27+15=" -> "12 04 42"."""
    a, _, b = prompt.rstrip("=").partition("+")
    units = int(a[-1]) + int(b[-1])
    tens = int(a[0]) + int(b[0]) + units // 10
    return f"{units:02d} {tens:02d} {answer}"


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _examples(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Returns prompt, worked answer, end token, padding: int64 [N, 6 + 10]."""
    pad, eos = int(tokenizer.pad_token_id), int(tokenizer.eos_token_id)
    rows = sums(held_out=False)
    ids = torch.full((len(rows), _PROMPT_WIDTH + _RESPONSE_WIDTH), pad)
    for row, (prompt, answer) in enumerate(rows):
        # Column sums first: the policy works them out before it answers.
        line = [*tokenizer(prompt + worked(prompt, answer))["input_ids"], eos]
        ids[row, : len(line)] = torch.tensor(line)
    return ids


def _warm_start(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Trains on the next token of worked sums in which a share of the answers' digits is wrong."""
    examples = _examples(tokenizer)
    pad = int(tokenizer.pad_token_id)
    zero = int(tokenizer("0")["input_ids"][0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=_WARM_LR, weight_decay=0.0, foreach=False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=_WARM_LR, total_steps=_WARM_STEPS, pct_start=0.1
    )
    model.train()
    for _ in range(_WARM_STEPS):
        # A part of the digits is wrong, so that the policy has the form and PPO has something left to learn.
        ids = examples[torch.randint(len(examples), (_WARM_BATCH,))]
        wrong = (torch.rand(ids.shape) < _NOISE) & (ids >= zero) & (ids < zero + 10)
        # The working stays right: it is what the reward does not judge, and so would not correct.
        wrong[:, :_ANSWER_STARTS] = False
        ids = torch.where(wrong, zero + torch.randint(10, ids.shape), ids)
        # The padding is on the right, so causal attention alone excludes it.
        logits = model(input_ids=ids[:, :-1], logits_to_keep=_RESPONSE_WIDTH).logits
        targets = ids[:, _PROMPT_WIDTH:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=pad)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


def build_model(directory: Path, *, head_dim: int = 16) -> Path:
    """Builds the tiny model and its tokenizer, or finds them already there (`build_once`).

    Args:
        head_dim: width of its four attention heads; vLLM's CPU kernels want at least 32.

    Returns:
        `directory`, a Hugging Face model directory.

    Raises:
        DataError: something else lies there.
    """

    def build(temp: Path) -> None:
        tokenizer = _tokenizer()
        with _reproducible():
            model: Any = Qwen2ForCausalLM(_config(tokenizer, head_dim))  # type: ignore[no-untyped-call]
            _warm_start(model, tokenizer)
        tokenizer.save_pretrained(str(temp))
        with _no_progress_bar():
            model.save_pretrained(str(temp))

    required = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    build_once(directory, build, required=required)
    return directory
