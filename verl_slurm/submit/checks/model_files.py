"""Checks a model directory without torch: errors that a job would otherwise find after its wait in the queue."""

import math
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from verl_slurm.base.bounded import (
    ADAPTER_FILES,
    SAFETENSORS_HEADER,
    TooMuch,
    decode_json,
    open_regular,
    read_end_tokens,
    read_model_config,
    read_regular,
)
from verl_slurm.base.errors import UNREADABLE, DataError
from verl_slurm.checkpoint.store.safetensors_file import read_header, safetensors_problem

__all__ = ["check_model", "num_parameters", "refuse_adapter", "weights_problem"]

T = TypeVar("T")

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
"""The names that `from_pretrained` looks for."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


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
    refuse_adapter(key, directory)
    if not (directory / "config.json").is_file():
        raise DataError("not a model directory", where=directory, expected="config.json in it", remedy=remedy)
    # Names first, then the contents of small files, and the headers of large ones last.
    _check_weights(key, directory, remedy)
    _check_config(directory / "config.json", remedy)
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise DataError(
            "the model directory has no tokenizer",
            where=directory,
            expected=" or ".join(_TOKENIZERS),
            remedy=f"save the tokenizer there too (tokenizer.save_pretrained), or {remedy}",
        )
    for path in sorted(directory.glob("*.safetensors")):
        if complaint := weights_problem(path):
            raise DataError(
                "the weights are damaged",
                where=path,
                found=complaint,
                remedy="copy or download that file again",
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


def _check_config(path: Path, remedy: str) -> None:
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
        read_end_tokens(path.parent)
    except UNREADABLE as error:
        raise DataError(
            "the model's end tokens cannot be read",
            where=path.parent,
            found=error,
            remedy="fix eos_token_id in that file",
        ) from None
