"""Every random generator of a rank: captured at a safe point, put back on resume.

Sampling noise and the order of data are counter-based (a function of seed, step and sample) and use none of
these. They are kept because a model may draw from them (dropout), and so may libraries.

Names in the runtime state: `python` (`random`), `numpy` (the legacy global), `torch`, and `cuda`, this rank's GPU's,
where it works on one. Fixed-width arrays, so nothing of it is pickled.

A state with `cuda` for a rank without one, or the other way round, is of a run that changed its device: that
generator begins anew, as all sums do.
"""

import math
import random
import struct
from collections.abc import Mapping

import numpy as np
import torch

from verl_slurm.base.errors import CheckpointCorrupt

Generators = dict[str, bytes]
"""The state of each generator, by name."""

# random.getstate(): version 3, 624 words and a position, the spare normal deviate (NaN: none).
_PYTHON = struct.Struct("<I625Id")
_PYTHON_VERSION = 3
# numpy's MT19937: 624 words, position, whether there is a spare normal deviate, the deviate.
_NUMPY = struct.Struct("<624IIId")


def seed_all(seed: int, rank: int) -> None:
    """Give every generator of this rank its own stream of the run's seed."""
    # SeedSequence mixes (seed, rank) well: neighbouring ranks get unrelated streams.
    words = np.random.SeedSequence([seed, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))  # CPU and all GPUs


def capture() -> Generators:
    """The state of every generator of this process. Changes none of them."""
    version, words, spare = random.getstate()
    if version != _PYTHON_VERSION:
        raise RuntimeError(f"random.getstate() has version {version}, this knows {_PYTHON_VERSION}")
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    if name != "MT19937":
        raise RuntimeError(f"numpy's global generator is {name}, this knows MT19937")
    state = {
        "python": _PYTHON.pack(version, *words, math.nan if spare is None else spare),
        "numpy": _NUMPY.pack(*np.asarray(keys).tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    # Asked, not made: the question for a device's state would create a context there, of some hundred MB, also where
    # the rank works on the CPU.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def restore(state: Mapping[str, bytes]) -> None:
    """Puts back what `capture` gave. CheckpointCorrupt: a generator is missing, or not of this format."""
    try:
        tensors = to_tensors(state)
        version, *words, spare = _PYTHON.unpack(state["python"])
        random.setstate((version, tuple(words), None if math.isnan(spare) else spare))
        *keys, position, has_gauss, gauss = _NUMPY.unpack(state["numpy"])
        if position > len(keys) or has_gauss > 1:
            # numpy takes any position, and then reads from outside of its table.
            raise ValueError(f"numpy: position {position} of {len(keys)}, {has_gauss} spare deviates")
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(tensors["torch"])
        if torch.cuda.is_initialized() and "cuda" in state:  # type: ignore[no-untyped-call]
            torch.cuda.set_rng_state(tensors["cuda"])
    except (KeyError, ValueError, TypeError, OverflowError, struct.error, RuntimeError) as error:
        raise CheckpointCorrupt(
            "the state of the random generators cannot be put back",
            found=error,
            expected="python, numpy and torch, as this version writes them",
            remedy="resume from an older checkpoint (verl-slurm list RUN)",
        ) from error


def to_tensors(state: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """Returns a state as `torch.load(weights_only=True)` takes it: uint8 [bytes] for each generator."""
    return {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in state.items()}


def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Generators:
    """Returns the argument of `to_tensors`."""
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
