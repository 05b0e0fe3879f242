"""Copies the small files of a model directory for an export, before any library looks at them.

The directory may be another user's. Only regular files within a limit are copied, and transformers sees the copies
alone.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base.bounded import (
    MODEL_CONFIG,
    TOKENIZER,
    Limit,
    check_json,
    decode_json,
    read_fd,
    read_regular,
)
from verl_slurm.base.errors import UNREADABLE, DataError
from verl_slurm.base.tree import open_below, open_directory
from verl_slurm.checkpoint.format.specification import CHAT_TEMPLATE
from verl_slurm.dataset.prompts.choice import is_never_data

# The files of a transformers tokenizer.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
)
_KNOWN = frozenset({*TOKENIZER_FILES, "config.json", "generation_config.json"})
# Includes vocabularies under other names.
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".spm", ".vocab", ".bpe", ".tiktoken")
_BLOB = re.compile(r"\.\./\.\./blobs/([0-9a-f]{40,64})", re.ASCII)
# Keys of config.json that name code or kernels; none of them says what tensors the model has.
_FETCHED = frozenset(
    {
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
        *("auto_map", "custom_pipelines"),
    }
)


def take_small_files(model_dir: Path, into: Path) -> None:
    """Copies the files of config and tokenizer into the directory `into`.

    Raises:
        DataError: there is no config.json, or one of the files that are needed is a link that leads elsewhere, no
            regular file, too large or unreadable for us.
    """
    # The user's own path may lead through links; from here on none is followed.
    directory = model_dir.resolve()
    if not os.path.lexists(directory / "config.json"):
        raise DataError(
            "there is no model config",
            where=model_dir,
            expected="a Hugging Face model directory with config.json",
            remedy="name the directory of the base model with --model DIR",
        )
    try:
        with open_directory(directory) as root:
            # By suffix: weights, code and pickles are never copied.
            names = sorted(name for name in os.listdir(root) if name.endswith(_SUFFIXES))
            for name in names:
                try:
                    data = _read(directory, root, name)
                except (OSError, *UNREADABLE) as error:
                    if name in _KNOWN:
                        raise _refused(directory / name, error) from None
                    # a trainer's log, or anything else: loading a tokenizer that needs it fails and names it
                    continue
                (into / name).write_bytes(data)
    except OSError as error:
        raise _refused(error.filename or directory, error) from error


def is_small(path: str, num_bytes: int) -> bool:
    """Returns whether an export may take the file at `path` of a model directory."""
    if "/" in path or path.endswith(".index.json") or is_never_data(path):
        return False
    return path.endswith(_SUFFIXES) and num_bytes <= TOKENIZER.num_bytes


def small_digests(model_dir: Path) -> dict[str, str]:
    """Maps the files that an export may take to their SHA-256; leaves out those that cannot be read."""
    found: dict[str, str] = {}
    for name in os.listdir(model_dir):
        if is_small(name, 0):
            with suppress(OSError, *UNREADABLE):
                data = read_regular(model_dir / name, Limit(num_bytes=TOKENIZER.num_bytes), follow=True)
                found[name] = hashlib.sha256(data).hexdigest()
    return found


def put_template(model_dir: Path, template: str) -> None:
    """Gives the tokenizer in `model_dir`, a copy of ours, the chat template `template` in the place of its own."""
    (model_dir / CHAT_TEMPLATE).write_bytes(template.encode())
    (model_dir / "chat_template.json").unlink(missing_ok=True)
    path = model_dir / "tokenizer_config.json"
    if path.is_file():
        said = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        # Programs that know no chat_template.jinja would render by the one in here.
        if said.pop("chat_template", None) is not None:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(said), indent=2) + b"\n")


def _read(directory: Path, root: int, name: str) -> bytes:
    is_json = name.endswith(".json")
    limit = MODEL_CONFIG if name == "config.json" else TOKENIZER
    with ExitStack() as opened:
        # No link is followed but those of Hugging Face's cache, from a snapshot into its own `blobs/`: one that leads
        # elsewhere would put any file of ours into the export.
        if os.path.islink(directory / name):
            blob = _BLOB.fullmatch(os.readlink(name, dir_fd=root))
            if blob is None:
                raise ValueError("a link that leads out of the directory")
            # Opened by the hash from the link, not through it: the link may be exchanged meanwhile.
            blobs = opened.enter_context(open_directory(directory.parent.parent / "blobs"))
            fd = opened.enter_context(open_below(blobs, blob[1]))
        else:
            fd = opened.enter_context(open_below(root, name))
        data = read_fd(fd, Limit(num_bytes=limit.num_bytes))
    # By the number of values too: a library makes objects of all of them.
    if is_json:
        check_json(data, limit)
    if name == "config.json":
        # Written anew: with a doubled key transformers might take another value than the one that was looked at.
        return msgspec.json.encode(_harmless(decode_json(data, dict[str, Any], limit, doubles=False)))
    return data


def _harmless(value: Any) -> Any:
    # Keys that name code or kernels to fetch and run are dropped, at any depth.
    if isinstance(value, Mapping):
        return {key: _harmless(inner) for key, inner in value.items() if key not in _FETCHED}
    return [_harmless(inner) for inner in value] if isinstance(value, list) else value


def _refused(where: object, error: BaseException) -> DataError:
    return DataError(
        "a file of the model directory is not taken",
        where=where,
        found=getattr(error, "strerror", None) or error,
        expected="a regular file, or a link of Hugging Face's cache into its own blobs/",
        remedy="put a copy of the file in its place, or name another directory with --model DIR",
    )
