"""Seeds the generators of ranks that no checkpoint has a state for, without torch and NumPy.

verl saves the state of each rank's generators: torch on the CPU and on the device, NumPy, and Python's `random`. A
rank beyond those that saved gets new ones, from a seed that depends on rank 0's state and on its own number alone. So
the same checkpoint always gives the same states, and no two ranks share one. A copy of another rank's state would draw
the same noise twice.

The states are those that `torch.manual_seed`, `torch.cuda.manual_seed`, `numpy.random.seed` and `random.seed` would
make of the seed. torch's CPU generator is an MT19937 in the layout of `at::CPUGeneratorImplState`
(aten/src/ATen/CPUGeneratorImpl.cpp), 5056 bytes; CUDA's is a seed and an offset, 16 bytes.
"""

import hashlib
import random
import struct
from typing import Any

_WORDS = 624
_CPU = struct.Struct(f"<Q i i Q {_WORDS}Q ddd i 4x f ? 3x")
_DEVICE = struct.Struct("<Qq")


def seed_of(state: bytes, rank: int) -> int:
    """Returns the seed of a new rank, 64 bits.

    Args:
        state: of rank 0's generator on the CPU.
    """
    return int.from_bytes(hashlib.sha256(state + b"|reshard|%d" % rank).digest()[:8], "little")


def torch_state(seed: int, like: int) -> bytes | None:
    """Returns the state of a generator of torch; None: there is none of `like` bytes that is known here."""
    if like == _CPU.size:
        return _CPU.pack(seed, 1, 1, 0, *_twister(seed), 0.0, 0.0, 0.0, 0, 0.0, False)
    return _DEVICE.pack(seed, 0) if like == _DEVICE.size else None


def numpy_state(seed: int) -> tuple[bytes, int]:
    """Returns the words of NumPy's legacy generator, and the position in them."""
    return struct.pack(f"<{_WORDS}I", *_twister(seed)), _WORDS


def python_state(seed: int) -> tuple[Any, ...]:
    """Returns `random.getstate()` after `random.seed(seed)`."""
    return random.Random(seed).getstate()  # noqa: S311 - verl's own use of it


def _twister(seed: int) -> list[int]:
    """Returns the words of an MT19937 after its seeding with the lower 32 bits of `seed` (Knuth's, of 2002)."""
    words = [seed & 0xFFFFFFFF]
    for at in range(1, _WORDS):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + at) & 0xFFFFFFFF)
    return words
