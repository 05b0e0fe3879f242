"""Checks a model directory without torch: errors that a job would otherwise find after its wait in the queue."""

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from verl_slurm.base.bounded import (
    ADAPTER_FILES,
    SAFETENSORS_HEADER,
    TOKENIZER,
    TooMuch,
    decode_json,
    open_regular,
    read_end_tokens,
    read_model_config,
    read_regular,
    vocabulary_of,
)
from verl_slurm.base.errors import UNREADABLE, DataError
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.checkpoint.store.safetensors_file import read_header, safetensors_problem
from verl_slurm.program.git import is_lfs_pointer

T = TypeVar("T")

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
"""The names that `from_pretrained` looks for."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _AddedToken(msgspec.Struct):
    content: str
    id: int = -1


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Tokenizer(msgspec.Struct):
    """tokenizer.json."""

    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []

    def ids(self) -> dict[str, int]:
        vocab = self.model.vocab
        own = vocab if isinstance(vocab, dict) else {text: row for row, (text, _) in enumerate(vocab)}
        return own | {token.content: token.id for token in self.added_tokens}


class _SpecialTokens(msgspec.Struct):
    """tokenizer_config.json, and special_tokens_map.json of older tokenizers."""

    eos_token: str | _AddedToken | msgspec.UnsetType | None = msgspec.UNSET
    pad_token: str | _AddedToken | msgspec.UnsetType | None = msgspec.UNSET
    added_tokens_decoder: dict[int, _AddedToken] = {}


def check_model(key: str, directory: Path, written: str = "") -> None:
    """Checks a Hugging Face model directory: weights, config, tokenizer. `builtin:` is not checked here.

    Args:
        key: `model.path` or `model.reward`, for the remedy.
        directory: absolute.
        written: the path as the user wrote it, to recognise a name on the Hugging Face hub.

    Raises:
        DataError: missing, without one of these, or one of them is damaged.
    """
    remedy = _remedy(key)
    if not directory.is_dir():
        # As written, since the absolute path of `org/name` looks like any other.
        if _HUB_NAME.fullmatch(written):
            # Taken for a hub's name by its form alone: nothing here asks the hub.
            remedy = (
                "names of the Hugging Face hub are not downloaded: "
                f"`hf download {written} --local-dir DIR` first, then set {key} to DIR"
            )
        raise DataError("no such model directory", where=directory, remedy=remedy)
    refuse_pointers(path for path in directory.iterdir() if path.is_file())
    refuse_adapter(key, directory)
    if not (directory / "config.json").is_file():
        raise DataError("not a model directory", where=directory, expected="config.json in it", remedy=remedy)
    # Names first, then the contents of small files, and the headers of large ones last.
    _check_weights(key, directory, remedy)
    named = _check_config(directory / "config.json", remedy)
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise DataError(
            "the model directory has no tokenizer",
            where=directory,
            expected=" or ".join(_TOKENIZERS),
            remedy=f"save the tokenizer there too (tokenizer.save_pretrained), or {remedy}",
        )
    if key == "model.path":
        _check_end_tokens(directory, named)
    for path in sorted(directory.glob("*.safetensors")):
        if complaint := weights_problem(path):
            raise DataError(
                "the weights are damaged",
                where=path,
                found=complaint,
                remedy="copy or download that file again",
            )


def refuse_pointers(files: Iterable[Path]) -> None:
    """Refuses files of which a clone has the place alone, because Git LFS was not there to bring the content.

    Raises:
        DataError: the first of them, and how many there are.
    """
    pointers = [file for file in files if is_lfs_pointer(file)]
    if pointers:
        raise DataError(
            "a file is a pointer of Git LFS, without its content",
            where=pointers[0],
            found=counted(len(pointers), "such file"),
            remedy=f"git -C {shell_word(pointers[0].parent)} lfs pull",
        )


def weights_problem(path: Path) -> str:
    """Returns what is wrong with a safetensors file; empty: nothing is. Raises `OSError`."""
    return _of_weights(path, safetensors_problem)


def _of_weights(path: Path, look: Callable[[int], T]) -> T | str:
    try:
        # Links are followed: users name models by them.
        fd = open_regular(path, follow=True)
    except TooMuch as error:
        return str(error)
    try:
        return look(fd)
    finally:
        os.close(fd)


def num_parameters(directory: Path) -> int | None:
    """Counts the numbers in the weights by the headers of the safetensors files; None: there are none to read.

    Raises:
        OSError: a file cannot be read.
    """
    total = 0
    for path in directory.glob("*.safetensors"):
        header = _of_weights(path, read_header)
        # A file that cannot be understood makes the whole sum unknown, and not smaller.
        if isinstance(header, str):
            return None
        entries = (entry for name, entry in header.entries.items() if name != "__metadata__")
        total += sum(math.prod(entry.shape or ()) for entry in entries)
    return total or None


def _remedy(key: str) -> str:
    if key == "model.reward":
        return (
            "set model.reward to classifier:DIR, a directory made by save_pretrained, or to rule:arithmetic"
        )
    return f"set {key} to a directory made by save_pretrained, or to builtin:tiny"


def refuse_adapter(key: str, directory: Path) -> None:
    """Refuses an adapter (LoRA), by itself or beside a model's files, where it would be left out in silence.

    Raises:
        DataError: there is one.
    """
    adapter = next((name for name in ADAPTER_FILES if (directory / name).is_file()), None)
    if adapter is None:
        return
    beside = any((directory / name).is_file() for name in (_WHOLE, _INDEX))
    raise DataError(
        "an adapter beside a model" if beside else "an adapter, not a model",
        where=directory,
        found=adapter,
        expected="whole weights and no adapter",
        remedy=f"merge it into its base model (PEFT's merge_and_unload), save that, and set {key} to it"
        + (f"; or remove {adapter} to use the model without it" if beside else ""),
    )


def _check_weights(key: str, directory: Path, remedy: str) -> None:
    # In the order in which `from_pretrained` looks for them.
    if (directory / _WHOLE).is_file():
        return
    if (directory / _INDEX).is_file():
        _check_index(directory, remedy)
        return
    # Each likely cause has its own words and remedy: pickles, a file of another name.
    pickled = [path.name for path in sorted(directory.glob("pytorch_model*.bin"))]
    expected = f"{_WHOLE} or {_INDEX}"
    if pickled:
        raise DataError(
            "the model's weights are pickled",
            where=directory,
            found=pickled[0],
            expected=expected,
            remedy=f"pickles are not read here; convert them once: {_conversion(key, directory)}",
        )
    there = [path.name for path in sorted(directory.glob("*.safetensors"))]
    raise DataError(
        "the model directory has no weights",
        where=directory,
        found=f"{there[0]}, which transformers does not look for" if there else None,
        expected=expected,
        remedy=remedy,
    )


def _conversion(key: str, directory: Path) -> str:
    kind = "AutoModelForCausalLM" if key == "model.path" else "AutoModelForSequenceClassification"
    code = f"from transformers import {kind} as M; d = {str(directory)!r}; M.from_pretrained(d).save_pretrained(d)"
    return f"python -c {shlex.quote(code)}"


def _check_index(directory: Path, remedy: str) -> None:
    """Checks that every shard in the index exists."""
    path = directory / _INDEX
    try:
        data = read_regular(path, SAFETENSORS_HEADER, follow=True)
        index = decode_json(data, _Index, SAFETENSORS_HEADER, doubles=False)
        shards = sorted(set(index.weight_map.values()))
    except UNREADABLE as error:
        raise DataError(
            "the index of the weights cannot be read", where=path, found=error, remedy=remedy
        ) from None
    # A name with a directory in it leads out of the model's.
    missing = [name for name in shards if Path(name).name != name or not (directory / name).is_file()]
    if missing or not shards:
        raise DataError(
            "the weights are incomplete",
            where=directory,
            found=f"no {missing[0]} ({len(missing)} of {len(shards)} shards missing)"
            if shards
            else "no shards",
            expected=f"every file that {_INDEX} names",
            remedy="copy or download the missing files",
        )


def _check_config(path: Path, remedy: str) -> tuple[int, ...]:
    """Returns the end tokens that the model's configuration names."""
    try:
        config = read_model_config(path.parent)
    except UNREADABLE as error:
        raise DataError(
            "the model's config.json is not JSON", where=path, found=error, remedy=remedy
        ) from None
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise DataError(
            "the model's config.json names no model",
            where=path,
            expected="text under 'model_type'",
            remedy=remedy,
        )
    try:
        return read_end_tokens(path.parent)
    except UNREADABLE as error:
        raise DataError(
            "the model's end tokens cannot be read",
            where=path.parent,
            found=error,
            remedy="fix eos_token_id in that file",
        ) from None


def _check_end_tokens(directory: Path, named: tuple[int, ...]) -> None:
    """Refuses a model without an end token, or with one that it cannot sample: each response would be cut."""
    token, pad, known = _special_tokens(directory)
    # Without the key, a class of tokenizers may have an end token of its own. The model's files then name it, too.
    if not token and (token is not msgspec.UNSET or not named):
        raise DataError(
            "the tokenizer has no end-of-sequence token",
            where=directory,
            found=f"eos_token_id {', '.join(map(str, named))} in the model's own files" if named else None,
            expected="eos_token in tokenizer_config.json; without it every response is cut at its greatest length",
            remedy='set eos_token there to the token that ends a text, e.g. "eos_token": "<|im_end|>"',
        )
    if token and known and token not in known:
        raise DataError(
            "the tokenizer's end token is not in its vocabulary",
            where=directory / "tokenizer_config.json",
            found=f"eos_token {token!r}",
            expected="a token of tokenizer.json",
            remedy="set eos_token to one that the model was trained with",
        )
    size = vocabulary_of(directory)
    if pad and size is not None and known.get(pad, -1) >= size:
        raise DataError(
            "the padding token is outside the model's vocabulary",
            where=directory,
            found=f"{pad!r}, token {known[pad]}",
            expected=f"below vocab_size={size} of config.json",
            remedy="set pad_token in tokenizer_config.json to one that the model has, e.g. its eos_token, or save the "
            "model after resize_token_embeddings",
        )
    own = known.get(token, -1) if token else -1
    # One of the model's that can be sampled is enough: a configuration may keep its class's default beside it.
    first = own if own >= 0 else min(named, default=-1)
    if size is not None and first >= size:
        raise DataError(
            "the end token is outside the model's vocabulary",
            where=directory,
            found=f"token {first}",
            expected=f"below vocab_size={size} of config.json: the model cannot sample another",
            remedy="fix eos_token_id in generation_config.json or config.json"
            if own < 0
            else "use the tokenizer that belongs to this model",
        )


def _special_tokens(
    directory: Path,
) -> tuple[str | msgspec.UnsetType | None, str | msgspec.UnsetType | None, dict[str, int]]:
    """Returns the tokenizer's end token and its padding, UNSET if no file has the key, and the tokens that can be
    looked up.
    """

    def read(name: str, form: type[T]) -> T | None:
        path = directory / name
        if not path.is_file():
            return None
        data = read_regular(path, TOKENIZER, follow=True)
        try:
            return decode_json(data, form, TOKENIZER, doubles=False)
        except msgspec.ValidationError:  # of a form that is not known here
            raise
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(
                "a file of the tokenizer is damaged",
                where=path,
                found=error,
                expected="JSON",
                remedy="copy or download that file again",
            ) from error

    try:
        special = read("tokenizer_config.json", _SpecialTokens) or _SpecialTokens()
        older = read("special_tokens_map.json", _SpecialTokens) or _SpecialTokens()
        tokenizer = read("tokenizer.json", _Tokenizer)
    # Not said here: loading the tokenizer says it with its reason.
    except DataError:
        raise
    except (OSError, *UNREADABLE):
        return "unreadable", None, {}
    added = {one.content: number for number, one in special.added_tokens_decoder.items()}
    end, pad = (
        token.content if isinstance(token, _AddedToken) else token
        for token in (
            older.eos_token if special.eos_token is msgspec.UNSET else special.eos_token,
            older.pad_token if special.pad_token is msgspec.UNSET else special.pad_token,
        )
    )
    return end, pad, tokenizer.ids() | added if tokenizer else {}
