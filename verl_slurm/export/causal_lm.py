"""Handles causal language models of all families alike, and builds the critic that fits each of them.

The critic is the family's own transformer with one linear layer of width 1 in place of the output head. Its tensors are
`PREFIX....` as in the causal model, then `score.weight` [1, H] and `score.bias` [1]. Hugging Face's token classifiers
with one label have the same names where they come from `GenericForTokenClassification` (Llama, Qwen, Mistral, ...).
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.modeling_outputs import TokenClassifierOutput

from verl_slurm.base.bounded import read_end_tokens
from verl_slurm.base.errors import UNREADABLE, DataError


def accepted(model: nn.Module, **words: Any) -> dict[str, Any]:
    """Returns those of `words` that the model's `forward` takes. MPT, for instance, has no `position_ids`."""
    known, any_word = _parameters(type(model).forward)
    # A `forward` with `**kwargs` gets all: Granite MoE passes `use_cache` on to its transformer like that. A word that
    # is unknown there is dropped silently.
    return {word: value for word, value in words.items() if any_word or word in known}


def names(model: nn.Module, word: str) -> bool:
    """Returns whether the model's `forward` has a parameter of that name."""
    return word in _parameters(type(model).forward)[0]


@lru_cache(maxsize=64)
def _parameters(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Returns the names, and whether there are `**kwargs`."""
    found = inspect.signature(forward).parameters
    return frozenset(found), any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found.values())


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the decoder's layers (`model.layers`, `transformer.h`, `model.decoder.layers`, ...), in their order."""
    # The outermost list of modules comes first. Nothing before the layers is a list in any family.
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return list(next(lists, nn.ModuleList()).children())


def end_tokens(model_path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that end a response: those of Hugging Face's `generate`, and the tokenizer's.

    Raises:
        DataError: the model directory names no token ids there.
    """
    try:
        named = read_end_tokens(model_path)
    except UNREADABLE as error:
        raise DataError(
            "the model's end tokens cannot be read",
            where=model_path,
            found=error,
            remedy="fix eos_token_id in that file",
        ) from None
    # A chat model often ends its turn with another token than its tokenizer names.
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *named]))


class ValueModel(nn.Module):
    """Computes a value for every token: logits [N, L, 1].

    Args:
        whole: a Hugging Face causal language model; its transformer is reused, its output head dropped.

    Raises:
        DataError: transformer and output head are not separate modules.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        transformer, head = whole.base_model, whole.get_output_embeddings()
        if transformer is whole or head is None:
            raise DataError(
                "this model's output head cannot be replaced by a value head",
                where=type(whole).__name__,
                expected="a transformer and an output head as separate modules",
                remedy="set train.algorithm=grpo, which has no critic",
            )
        self.config = whole.config
        self._prefix = str(whole.base_model_prefix)
        self.add_module(self._prefix, transformer)
        # As wide as the output head: OPT projects its hidden states to another width. The head starts at zero, so the
        # first values are 0 instead of noise; skip_init draws nothing from the global generator.
        like: Tensor = head.weight
        made = nn.utils.skip_init(  # type: ignore[no-untyped-call]
            nn.Linear, like.shape[1], 1, dtype=like.dtype, device=like.device
        )
        self.score: nn.Linear = made
        with torch.no_grad():
            for parameter in self.score.parameters():
                parameter.zero_()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
    ) -> TokenClassifierOutput:
        """Returns the output of Hugging Face's token classifiers."""
        transformer = self.get_submodule(self._prefix)
        words = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        hidden = transformer(input_ids, **accepted(transformer, **words)).last_hidden_state
        return TokenClassifierOutput(logits=self.score(hidden))
