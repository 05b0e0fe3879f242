"""Runtime state against its peers: time to encode and decode, and size.

    python benchmarks/runtime_state.py [--reps 21] [--rollouts 512] [--tokens 1000] [--ids int64] [--torch] [--json]

All of them in one process, one after the other in every repetition, in an order drawn anew (what ran before decides
which memory is warm); the first repetition is thrown away. Medians, and ratios to this project's codec (above 1: it is
faster, or smaller). Every peer gets the same arrays by column, which is the fast way to pickle them; a dictionary for
each rollout is listed besides. Decoding ends with arrays in memory. One thread each. `--small` only shows that it runs.

Where the time goes here (idle machine, int64 ids: 2.4 ms to encode, 1.5 ms to decode): to encode, zstd 1.1 ms, the
copy into one `bytes` 0.5 (the first touch of its memory), shift and cast into planes 0.6, the widest bit of the ids
0.1. To decode, joining planes 0.8 ms, Huffman decoding of the one plane of exponents 0.3, frames that are only stored
0.2. With int32 ids the peers have a third less to read, and joining four bytes costs what it costs: 2 times, not 3,
on decoding. Tried and left: a transposed copy of the bytes (three times as slow as shift and cast), chunks of 2^15 to
2^19 items (2^18 is best by a tenth), level 1 as it is for the exponents (three times as slow, and larger).

Token ids are drawn from Zipf's law over a vocabulary of 151,936 (Qwen2) and permuted, and no response repeats another:
the worst case for whoever compresses ids. Log probabilities are gamma distributed, as those of a sampled response.
"""

import argparse
import io
import json
import os
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import zstandard

from verl_slurm.runtime_state import codec
from verl_slurm.runtime_state.format import Arrays, RuntimeState

_VOCABULARY = 151_936
_OURS = "verl-slurm (byte shuffle + zstd-1)"

Codec = tuple[Callable[[], bytes], Callable[[bytes], Any]]


def rollouts(num: int, tokens: int, ids: str, seed: int = 0) -> Arrays:
    """Response ids [num, tokens] and their log probabilities float32 [num, tokens]."""
    draw = np.random.default_rng(seed)
    weight = 1 / np.arange(1, _VOCABULARY + 1) ** 1.05
    cdf = np.cumsum(weight / weight.sum())
    rank = np.minimum(np.searchsorted(cdf, draw.random((num, tokens))), _VOCABULARY - 1)
    return {
        "response_ids": draw.permutation(_VOCABULARY)[rank].astype(ids),
        "logprobs": (-draw.gamma(0.35, 1.0, (num, tokens))).astype(np.float32),
    }


def codecs(arrays: Arrays, with_torch: bool) -> dict[str, Codec]:
    """What is measured, by name."""
    state = RuntimeState(
        rank=0,
        world_size=1,
        step=1,
        phase="update",
        index=0,
        safe_point=0,
        rollout_offset=len(arrays["response_ids"]),
        episode_id=0,
        kl_coef=0.1,
        rollouts=arrays,
    )
    rows = [{name: array[i] for name, array in arrays.items()} for i in range(len(arrays["response_ids"]))]

    def zstd(level: int, value: Any) -> Codec:
        packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        return (
            lambda: packer.compress(pickle.dumps(value, 5)),
            lambda data: pickle.loads(unpacker.decompress(data)),
        )

    found: dict[str, Codec] = {
        _OURS: (lambda: codec.encode(state), codec.decode),
        "pickle 5": (lambda: pickle.dumps(arrays, 5), pickle.loads),
        "pickle 5 + zstd-1": zstd(1, arrays),
        "pickle 5 + zstd-3": zstd(3, arrays),
        "pickle 5 + zstd-1, a dict each": zstd(1, rows),
    }
    if with_torch:
        import torch

        def save() -> bytes:
            buffer = io.BytesIO()
            torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, buffer)
            return buffer.getvalue()

        found["torch.save"] = (save, lambda data: torch.load(io.BytesIO(data), weights_only=True))
    return found


def measure(arrays: Arrays, reps: int, with_torch: bool) -> dict[str, dict[str, float]]:
    """Median milliseconds and bytes of each codec, by name; ours first."""
    peers = codecs(arrays, with_torch)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    sizes = {}
    order = list(peers)
    for rep in range(reps + 1):
        for name in order:
            encode, decode = peers[name]
            began = time.perf_counter()
            data = encode()
            between = time.perf_counter()
            back = decode(data)
            ended = time.perf_counter()
            if rep == 0:
                _check(back, arrays)
                sizes[name] = len(data)
            else:
                times[name].append((between - began, ended - between))
            del back
        random.Random(rep).shuffle(order)
    result = {}
    ours = times[_OURS]
    for name, spans in times.items():
        encode_ms, decode_ms = (1e3 * statistics.median(span[i] for span in spans) for i in (0, 1))
        own = [1e3 * statistics.median(span[i] for span in ours) for i in (0, 1)]
        result[name] = {
            "encode_ms": encode_ms,
            "decode_ms": decode_ms,
            "bytes": sizes[name],
            "encode_ratio": encode_ms / own[0],
            "decode_ratio": decode_ms / own[1],
            "size_ratio": sizes[name] / sizes[_OURS],
        }
    return result


def _check(back: Any, arrays: Arrays) -> None:
    """That `back` holds `arrays`, bit for bit."""
    if isinstance(back, RuntimeState):
        back = back.rollouts
    if isinstance(back, list):
        back = {name: np.stack([row[name] for row in back]) for name in arrays}
    for name, array in arrays.items():
        assert np.asarray(back[name]).tobytes() == array.tobytes(), name


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reps", type=int, default=21)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--ids", choices=("int64", "int32"), default="int64", help="the trainer has int64")
    parser.add_argument("--torch", action="store_true", help="torch.save as well")
    parser.add_argument("--small", action="store_true", help="a few rollouts, once: does it run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.small:
        options.reps, options.rollouts, options.tokens = 1, 8, 64
    arrays = rollouts(options.rollouts, options.tokens, options.ids)
    raw = sum(array.nbytes for array in arrays.values())
    load = os.getloadavg()[0]
    result = measure(arrays, options.reps, options.torch)
    if options.json:
        print(json.dumps({"raw_bytes": raw, "reps": options.reps, "load": load, "codecs": result}))
        return 0
    print(
        f"{options.rollouts} rollouts of {options.tokens} tokens, {options.ids} ids: {raw / 2**20:.2f} MiB; "
        f"{options.reps} repetitions, load {load:.1f}\n"
    )
    print(
        "| codec | encode ms | x | decode ms | x | MiB | x |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    for name, row in result.items():
        print(
            f"| {name} | {row['encode_ms']:.2f} | {row['encode_ratio']:.1f} | {row['decode_ms']:.2f} | "
            f"{row['decode_ratio']:.1f} | {row['bytes'] / 2**20:.2f} | {row['size_ratio']:.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
