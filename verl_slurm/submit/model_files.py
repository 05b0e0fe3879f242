"""A look at a model directory without torch: what a job would otherwise find out after its wait in the queue."""

import math
import re
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.checkpoint.safetensors_file import read_header, safetensors_problem
from verl_slurm.errors import UNREADABLE, DataError

__all__ = ["check_model", "num_parameters", "read_model_config"]

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_model(key: str, directory: Path, written: str = "") -> None:
    """A Hugging Face model directory: weights, config, tokenizer. `builtin:` is not asked about here.

    Args:
        key: `model.path` or `model.reward`, for the remedy.
        directory: absolute.
        written: the path as the user wrote it, to know a name of the Hugging Face hub by.

    Raises:
        DataError: missing, without one of these, or one of them is damaged.
    """
    remedy = _remedy(key)
    if not directory.is_dir():
        if _HUB_NAME.fullmatch(written):
            remedy = (
                "names of the Hugging Face hub are not downloaded: "
                f"`hf download {written} --local-dir DIR` first, then set {key} to DIR"
            )
        raise DataError("no such model directory", where=directory, remedy=remedy)
    if not (directory / "config.json").is_file():
        raise DataError("not a model directory", where=directory, expected="config.json in it", remedy=remedy)
    if not any(next(directory.glob(pattern), None) for pattern in _WEIGHTS):
        raise DataError(
            "the model directory has no weights",
            where=directory,
            expected=" or ".join(_WEIGHTS),
            remedy=remedy,
        )
    _check_config(directory / "config.json", remedy)
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise DataError(
            "the model directory has no tokenizer",
            where=directory,
            expected=" or ".join(_TOKENIZERS),
            remedy=f"save the tokenizer there too (tokenizer.save_pretrained), or {remedy}",
        )
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            complaint = safetensors_problem(file.fileno())
        if complaint:
            raise DataError(
                "the weights are damaged",
                where=path,
                found=complaint,
                remedy="copy or download that file again",
            )


def read_model_config(directory: Path) -> dict[str, Any]:
    """The content of the model's config.json. Called by: submit.preflight, after `check_model`."""
    return msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, Any])


def num_parameters(directory: Path) -> int | None:
    """How many numbers the weights are, by the headers of the safetensors files; None: there are none to read.

    Raises:
        OSError: a file cannot be read.

    Called by: submit.room, after `check_model`.
    """
    shapes: list[list[Any]] = []
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = read_header(file.fileno())
        if isinstance(header, str):
            return None
        entries = (entry for name, entry in header.entries.items() if name != "__metadata__")
        shapes += [entry.get("shape") or [] for entry in entries]
    try:
        return sum(math.prod(int(size) for size in shape) for shape in shapes) or None
    except (TypeError, ValueError):
        return None


def _remedy(key: str) -> str:
    if key == "model.reward":
        return (
            "set model.reward to classifier:DIR, a directory made by save_pretrained, or to rule:arithmetic"
        )
    return f"set {key} to a directory made by save_pretrained, or to builtin:tiny"


def _check_config(path: Path, remedy: str) -> None:
    try:
        config = msgspec.json.decode(path.read_bytes())
    except UNREADABLE as error:
        raise DataError(
            "the model's config.json is not JSON", where=path, found=error, remedy=remedy
        ) from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or not kind:
        raise DataError(
            "the model's config.json names no model",
            where=path,
            expected="text under 'model_type'",
            remedy=remedy,
        )
