"""Whether two checkpoints of verl hold the same numbers, bit for bit. Loads pickles: only what the tests have made."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def differences(ours: Path, theirs: Path) -> list[str]:
    """Of two `global_step_N`: every file and every number in them; empty where there is none."""
    import torch

    names = [
        sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) for root in (ours, theirs)
    ]
    if names[0] != names[1]:
        return [f"files: {sorted(set(names[0]) ^ set(names[1]))}"]
    assert any(name.startswith("model_") for name in names[0]), "nothing to compare"
    found = []
    for name in names[0]:
        if not name.endswith(".pt"):
            if (ours / name).read_bytes() != (theirs / name).read_bytes():
                found.append(name)
            continue
        a, b = (dict(_leaves(torch.load(root / name, weights_only=False))) for root in (ours, theirs))
        found += [f"{name}{key}" for key in a.keys() | b.keys() if not _equal(a.get(key), b.get(key))]
    return found


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from _leaves(inner, f"{where}[{at}]")
    else:
        yield where, value


def _equal(a: Any, b: Any) -> bool:
    import numpy as np
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        one, other = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
        same_bits = one.dtype == other.dtype and one.shape == other.shape
        raw = (t.contiguous().view(-1).view(torch.uint8) for t in (one, other))
        return same_bits and (one.numel() == 0 or torch.equal(*raw))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.tobytes() == b.tobytes()
    return type(a) is type(b) and (a == b or repr(a) == repr(b))
