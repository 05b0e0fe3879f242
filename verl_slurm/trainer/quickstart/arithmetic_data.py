"""The built-in data: sums of two numbers, a few thousand to train on and some held out.

```
DIRECTORY/train/sums.jsonl      the data root of a run: {"prompt": "27+15=", "answer": "42"}, one per line
DIRECTORY/heldout/sums.jsonl    never in the root, so never in its fingerprint and never trained on
```

The bytes are the same on every machine: a hash of a pair decides whether it is held out.
"""

import hashlib
import json
from pathlib import Path

from verl_slurm.base.errors import DataError
from verl_slurm.trainer.quickstart import build_once

_OPERANDS = range(10, 70)
_HELD_OUT_EVERY = 10


def _is_held_out(a: int, b: int) -> bool:
    # By a hash, not by a generator: the same split on every machine and in every version of Python.
    return hashlib.sha256(f"{a}+{b}".encode()).digest()[0] % _HELD_OUT_EVERY == 0


def sums(*, held_out: bool) -> list[tuple[str, str]]:
    """Returns all (prompt, answer) of one side of the split, in order: ("27+15=", "42")."""
    pairs = [(a, b) for a in _OPERANDS for b in _OPERANDS if _is_held_out(a, b) == held_out]
    return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def _jsonl(rows: list[tuple[str, str]]) -> bytes:
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
    return ("\n".join(lines) + "\n").encode()


def build_data(directory: Path) -> Path:
    """Writes the data set, or finds it already there (`build_once`).

    Returns:
        `directory/train`, to be used as `data.root`.

    Raises:
        DataError: something else lies there, or a file was changed.
    """
    files = {f"{side}/sums.jsonl": _jsonl(sums(held_out=side == "heldout")) for side in ("train", "heldout")}

    def build(temp: Path) -> None:
        for name, content in files.items():
            (temp / name).parent.mkdir(mode=0o700)
            (temp / name).write_bytes(content)

    build_once(directory, build, required=tuple(files))
    for name, content in files.items():
        # A run trains on the built-in sums or on a copy with a name of its own.
        if (directory / name).read_bytes() != content:
            raise DataError(
                "a file of the built-in data set was changed",
                where=directory / name,
                expected="the built-in sums",
                remedy=f"remove {directory}, or copy it elsewhere and set data.root",
            )
    return directory / "train"
