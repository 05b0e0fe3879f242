"""Reads files that other users may have written, in bounded memory.

A file from outside (a checkpoint, a run, a model, a directory of verl) chooses its own size and content. Each kind of
small file has a `Limit` here: what real files need, and below 300 MB more for a command that reads a hostile one.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import shell_word

T = TypeVar("T")

# Depth of nested objects; our own files have at most six levels.
_MAX_DEPTH = 64
# Bytes of text that is not ASCII: one such character can make Python take four bytes for each of its text.
_MAX_UNICODE = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Bounds one kind of file: its bytes, and its JSON values, counted as commas and opening brackets."""

    num_bytes: int
    # A size alone would bound memory only to 26 times itself: Python needs 32 to 104 bytes for a JSON value
    # of two characters.
    num_values: int = 0


MANIFEST = Limit(num_bytes=64 << 20, num_values=1_250_000)
"""manifest.json: a leaf of 67 bytes for each 4 MiB of tensors, enough for 3.7 TB; 10,000 ranks need 6.4 MB besides."""
INDEX = Limit(num_bytes=256 << 20, num_values=36_000_000)
"""index.json for a load: about 100 bytes and 9 values per piece, or per run of pieces."""
SHOWN_INDEX = Limit(num_bytes=32 << 20, num_values=4_500_000)
"""index.json for a look (`inspect`): 300,000 pieces. A larger index is not listed."""
DATA_FILES = Limit(num_bytes=32 << 20, num_values=1_250_000)
"""orchestration.json: two values and 100 bytes per data file, enough for 300,000 files."""
FINGERPRINT = Limit(num_bytes=512 << 20, num_values=16_000_000)
"""Fingerprint of a data set: 150 bytes per file."""
RECORD = Limit(num_bytes=8 << 20, num_values=1_000_000)
"""metadata.json (4096 rows of history), and the files that parts of verl-slurm write for each other."""
JOURNAL = Limit(num_bytes=32 << 20, num_values=2_000_000)
"""events.jsonl, read from its end: 200 bytes and 10 values per event."""
SMALL = Limit(num_bytes=1 << 20, num_values=200_000)
"""schema_version.json, scheduler.json, status.json, run_id and similar files: some KB."""
SOURCE = Limit(num_bytes=256 << 10)
"""A reward in Python: its syntax tree takes up to 900 times as much."""
CONFIG = Limit(num_bytes=1 << 20)
"""config.yaml and run.yaml; `strict_yaml` counts their values itself."""
MODEL_CONFIG = Limit(num_bytes=4 << 20, num_values=500_000)
"""config.json of a Hugging Face model: some KB, with a label for each class up to a MB."""
TOKENIZER = Limit(num_bytes=64 << 20, num_values=3_500_000)
"""The small files of a model; the largest tokenizer.json has 35 MB and 2.2 million values."""
SAFETENSORS_HEADER = Limit(num_bytes=32 << 20, num_values=2_500_000)
"""About 100 bytes and 7 values per tensor: 300,000 tensors in one file. The library itself allows 100 MB."""


class TooMuch(VerlSlurmError, ValueError):
    """A file, or the JSON in it, exceeds its limit, or the name is not of a regular file. `one_line` names the path."""

    exit_code = ExitCode.PERMISSION


@contextmanager
def named(path: Path | str) -> Iterator[None]:
    """Has each `TooMuch` from within name this path, and each error of the system that names none."""
    try:
        yield
    except TooMuch as error:
        error.where, error.remedy = path, f"see what lies there: ls -ld {shell_word(path)}"
        raise
    except OSError as error:
        # Of a call by descriptor it is None, or the descriptor.
        if error.errno is not None and not isinstance(error.filename, str | bytes):
            error.filename = str(path)
        raise


def open_regular(path: Path | str, *, follow: bool = False) -> int:
    """Opens a regular file for reading and returns its descriptor; `follow`: the last name may be a link.

    Raises:
        OSError: the file does not exist, or is not readable for us.
        TooMuch: it is no regular file.
    """
    # O_NONBLOCK: opening a FIFO in place of a file must not wait for a writer.
    # Links are for paths that users type.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with named(path):
        try:
            fd = os.open(path, flags)
        except OSError:
            # A link, a socket and a device without a driver cannot be opened; each has an errno of its own.
            _require_regular(os.stat(path, follow_symlinks=follow))
            raise
        try:
            # Of the descriptor: the name may be exchanged between a look and the opening.
            _require_regular(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
    return fd


def read_regular(path: Path | str, limit: Limit, *, follow: bool = False) -> bytes:
    """Reads all of a regular file, if it is within `limit`. Raises as `open_regular` and `read_fd`."""
    fd = open_regular(path, follow=follow)
    try:
        with named(path):
            return read_fd(fd, limit)
    finally:
        os.close(fd)


def read_fd(fd: int, limit: Limit) -> bytes:
    """Reads an open regular file, if it is within `limit`: at most the size that it had when it was opened.

    Raises:
        OSError: the storage did not deliver it, or it was truncated meanwhile.
        TooMuch: it is larger, or no regular file.
    """
    info = os.fstat(fd)
    _require_regular(info)
    # Before memory is taken for it: a sparse file of any size costs its maker nothing.
    if info.st_size > limit.num_bytes:
        raise TooMuch(f"{info.st_size} bytes, at most {limit.num_bytes}")
    # The size at the opening: a file that grows without end is read up to there.
    data = bytearray(info.st_size)
    done = 0
    while done < len(data):
        count = os.preadv(fd, [memoryview(data)[done : done + (64 << 20)]], done)
        if not count:
            raise OSError(errno.EIO, "the file was cut while it was read")
        done += count
    return bytes(data)


def check_json(data: bytes, limit: Limit) -> None:
    """Raises TooMuch if there are more bytes or values than `limit`. It does not check that the bytes are JSON."""
    if len(data) > limit.num_bytes:
        raise TooMuch(f"{len(data)} bytes, at most {limit.num_bytes}")
    if len(data) > _MAX_UNICODE and not data.isascii():
        raise TooMuch(f"{len(data)} bytes that are not ASCII, at most {_MAX_UNICODE}")
    # Commas in strings count as well: too many at worst, without a look at the JSON's structure.
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > limit.num_values:
        raise TooMuch(f"{values} JSON values, at most {limit.num_values}")


def decode_json(data: bytes, form: type[T], limit: Limit, *, doubles: bool = True) -> T:
    """Decodes JSON as `form`: within `limit`, without NaN, Infinity, overflowing numbers, and doubled keys
    (`doubles`).

    Raises:
        ValueError, RecursionError: it has one of those, is no JSON, or is not of this form.
    """
    # Counted in the bytes: no object exists yet.
    check_json(data, limit)
    # Not where they cannot mislead another reader.
    if doubles:
        refuse_doubled_keys(data)
    return msgspec.json.decode(data, type=form)


# Matches the tokens of JSON that keys need: a run of strings that are values, a string, a bracket of an object. The
# pattern is possessive, and a string without an end is one token, so hostile text costs one look at each byte.
_TOKEN = re.compile(
    rb'(?:"[^"\\]*+"[ \t\r\n]*+,[ \t\r\n]*+)++'
    rb'|"((?:[^"\\]++|\\.)*+)(?:"[ \t\r\n]*+(:?)|\\?\Z)'
    rb"|([{}])",
    re.DOTALL,
)


def refuse_doubled_keys(data: bytes) -> None:
    """Raises ValueError for JSON with a key twice in one object, or with objects nested deeper than any of ours."""
    # One set of keys for each object that is open.
    # Of a doubled key two readers may take two different values: msgspec the last one, silently.
    keys: list[set[bytes]] = []
    for match in _TOKEN.finditer(data):
        bracket = match[3]
        if bracket == b"{":
            keys.append(set())
            if len(keys) > _MAX_DEPTH:
                raise ValueError(f"more than {_MAX_DEPTH} objects in each other")
        elif bracket == b"}":
            if keys:
                keys.pop()
        # Followed by a colon: the string is a key.
        elif match[2] and keys:
            key = match[1]
            if b"\\" in key:
                # An escape may spell the same key in another way.
                key = msgspec.json.decode(b'"%b"' % key, type=str).encode("utf-8", "surrogatepass")
            if key in keys[-1]:
                raise ValueError("a key is there twice")
            keys[-1].add(key)


_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
}


def _require_regular(info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise TooMuch(f"no regular file, but {_KINDS.get(stat.S_IFMT(info.st_mode), 'a device')}")


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""PEFT's, beside or in place of a model's weights."""


def read_model_config(directory: Path) -> dict[str, Any]:
    """Reads the config.json of a model directory. Raises as `read_regular` and `decode_json`."""
    data = read_regular(directory / "config.json", MODEL_CONFIG, follow=True)
    return decode_json(data, dict[str, Any], MODEL_CONFIG, doubles=False)


def vocabulary_of(directory: Path) -> int | None:
    """Returns the number of tokens of a directory's model; None: it does not say. Raises as `read_model_config`."""
    config = read_model_config(directory)
    inner = config.get("text_config")
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else None


def read_end_tokens(directory: Path) -> tuple[int, ...]:
    """Returns the ids that end a response, as Hugging Face's `generate` takes them: those of generation_config.json,
    or of config.json where that file is missing.

    Raises:
        ValueError: they are no token ids; or as `read_regular` and `decode_json`.
    """
    name = "generation_config.json"
    if (directory / name).is_file():
        data = read_regular(directory / name, MODEL_CONFIG, follow=True)
        said = decode_json(data, dict[str, Any], MODEL_CONFIG, doubles=False).get("eos_token_id")
    else:
        name, config = "config.json", read_model_config(directory)
        inner = config.get("text_config")
        said = config.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
    ids = said if isinstance(said, list) else [] if said is None else [said]
    if not all(type(one) is int and 0 <= one < 1 << 31 for one in ids):
        raise ValueError(f"eos_token_id {said!r} in {name}, expected a token id or a list of them")
    return tuple(dict.fromkeys(ids))
