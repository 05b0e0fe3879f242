"""Random numbers as a function of their purpose, independent of how many were drawn before.

Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a key and a counter to random
bits. The key holds the run's seed and a purpose; the counter identifies the number. So a resumed, resharded or replayed
run draws the same numbers, and no generator state has to be saved. NumPy promises a stable stream for a bit generator's
raw output (NEP 19), not for its distributions. So everything here is built from `random_raw` alone.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """The purpose of random numbers; two purposes never share a stream. Values are part of a run's identity."""

    SAMPLE_TOKEN = 1
    DATA_ORDER = 2
    MINI_BATCH_ORDER = 3
    EVALUATION = 4


def _raw(seed: int, purpose: Purpose, counter: Sequence[int], num: int) -> NDArray[np.uint64]:
    """Draws `num` random 64-bit words. `counter` has at most three parts; the fourth counts the words."""
    if not 0 <= seed < 2**64 or len(counter) > 3 or not all(0 <= part < 2**64 for part in counter):
        raise ValueError(f"seed {seed} or counter {tuple(counter)} does not fit Philox4x64")
    # words[0] counts the draws: numbers of one stream never reach the next counter.
    words = np.zeros(4, dtype=np.uint64)
    words[1 : 1 + len(counter)] = np.array(counter, dtype=np.uint64)
    generator = np.random.Philox(counter=words, key=np.array([seed, purpose], dtype=np.uint64))
    return np.asarray(generator.random_raw(num), dtype=np.uint64)


def uniforms(
    seed: int,
    step: int,
    sample_ids: Sequence[int],
    num_tokens: int,
    *,
    sample_index: int = 0,
    purpose: Purpose = Purpose.SAMPLE_TOKEN,
) -> NDArray[np.float64]:
    """Draws one uniform number in [0, 1) for each sample and token position.

    Args:
        sample_ids: global prompt counters, N of them.
        num_tokens: T.
        sample_index: index among several samples of the same prompt.
        purpose: SAMPLE_TOKEN, or EVALUATION, whose sample ids count other prompts.

    Returns:
        float64 [N, T]; row n depends on `sample_ids[n]` alone, column t on the position t alone.
    """
    # A stream for each sample: its numbers are the same in any batch and on any rank.
    rows = [_raw(seed, purpose, (step, sample_id, sample_index), num_tokens) for sample_id in sample_ids]
    raw = np.stack(rows) if rows else np.zeros((0, num_tokens), dtype=np.uint64)
    # 53 bits, as many as a float64 holds exactly, so 1.0 never comes.
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, purpose: Purpose, counter: Sequence[int], size: int) -> NDArray[np.int64]:
    """Returns a random order of `range(size)`, the same for the same arguments on every machine.

    Args:
        purpose: `DATA_ORDER` (counter: epoch) or `MINI_BATCH_ORDER` (counter: step, PPO epoch).
        counter: at most three non-negative integers.
    """
    # stable: equal words, however unlikely, are in one order on every machine.
    return np.argsort(_raw(seed, purpose, counter, size), kind="stable").astype(np.int64)
