"""Are two checkpoints the same, bit for bit? `python -m verl_slurm.dcp.compare DIR_A DIR_B [--json]`

Compared are all weights and all optimizer state, tensor by tensor and byte by byte (so NaN equals the same
NaN, and 0.0 differs from -0.0), and with them the schedulers and each rank's runtime state: position,
generators, KL window, rollouts, buffers, metric history. Not compared is what must differ: times, epochs,
parents. Both directories are verified first.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from verl_slurm.checkpoint.reader import CheckpointReader
from verl_slurm.checkpoint.run_keys import keys_for
from verl_slurm.checkpoint.tensor_index import TensorIndex
from verl_slurm.checkpoint.verify import verify
from verl_slurm.dcp.loader import read_index, read_whole
from verl_slurm.errors import CheckpointCorrupt, VerlSlurmError
from verl_slurm.exit_codes import ExitCode
from verl_slurm.keys import Keyring
from verl_slurm.runtime_state.codec import decode
from verl_slurm.runtime_state.format import RUNTIME_STATE_FILE

__all__ = ["Comparison", "compare", "main"]

# Tensors are read in groups of about this many bytes: two whole checkpoints need not fit into memory.
_GROUP_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was compared and where it differs.

    Attributes:
        num_tensors: compared byte by byte in both.
        num_bytes: of these, in one of the two.
        differing: names of what differs or is only on one side, `domain/name`; empty: the same.
    """

    a: str
    b: str
    num_tensors: int
    num_bytes: int
    differing: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not self.differing


def compare(a: Path, b: Path, keys_a: Keyring | None = None, keys_b: Keyring | None = None) -> Comparison:
    """Compare two checkpoint directories.

    Args:
        keys_a, keys_b: of the two, where they are encrypted.

    Raises:
        KeyRefused: a key is missing, or another one.
        CheckpointCorrupt: one of them does not verify.

    Called by: cli, tests.
    """
    domains: list[set[str]] = []
    for directory, keys in ((a, keys_a), (b, keys_b)):
        verdict = verify(directory, keys=keys)
        if verdict.needs_key:
            CheckpointReader(directory, keys)  # raises, and says which
        if not verdict.ok or verdict.manifest is None:
            first = verdict.problems[0]
            raise CheckpointCorrupt(
                "a checkpoint to compare does not verify",
                where=directory,
                found=f"{first.path}: {first.what}",
                remedy="compare checkpoints that verify (verl-slurm verify DIR)",
            )
        domains.append(set(verdict.manifest.domains))
    differing = [f"{domain}/ (only in one)" for domain in sorted(domains[0] ^ domains[1])]
    num_tensors = num_bytes = 0
    for domain in sorted(domains[0] & domains[1]):
        left_index, right_index = read_index(a, domain, keys_a), read_index(b, domain, keys_b)
        mine, other = left_index.tensors, right_index.tensors
        differing += [f"{domain}/{name} (only in one)" for name in sorted(mine.keys() ^ other.keys())]
        common = sorted(mine.keys() & other.keys())
        alike = [
            name
            for name in common
            if (mine[name].dtype, mine[name].shape) == (other[name].dtype, other[name].shape)
        ]
        differing += [f"{domain}/{name} (shape or type)" for name in common if name not in set(alike)]
        for group in _groups(left_index, alike):
            left, right = _read(a, domain, group, keys_a), _read(b, domain, group, keys_b)
            for name in group:
                num_tensors += 1
                num_bytes += left[name].nbytes
                if not _same_bytes(left[name], right[name]):
                    differing.append(f"{domain}/{name}")
    differing += _compare_small(a, b, CheckpointReader(a, keys_a), CheckpointReader(b, keys_b))
    return Comparison(
        a=str(a), b=str(b), num_tensors=num_tensors, num_bytes=num_bytes, differing=tuple(differing)
    )


def _groups(index: TensorIndex, names: list[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name in names:
        group.append(name)
        size += index.tensors[name].num_bytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _read(directory: Path, domain: str, names: list[str], keys: Keyring | None) -> dict[str, np.ndarray]:
    # As bytes: numpy has no bfloat16, and bytes are what is compared.
    tensors = read_whole(directory, domain, names, keys)
    return {name: tensor.reshape(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}


def _same_bytes(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _compare_small(a: Path, b: Path, in_a: CheckpointReader, in_b: CheckpointReader) -> Iterator[str]:
    """Schedulers and runtime states; yields the names of what differs."""
    if in_a.read("scheduler.json") != in_b.read("scheduler.json"):
        yield "scheduler.json"
    names = {path.name for side in (a, b) for path in side.iterdir()}
    for name in sorted(filter(RUNTIME_STATE_FILE.fullmatch, names)):
        if not ((a / name).exists() and (b / name).exists()):
            yield f"{name} (only in one)"
            continue
        left, right = (
            decode(reader.read(name), where=side / name) for side, reader in ((a, in_a), (b, in_b))
        )
        for field in left.__struct_fields__:
            mine, other = getattr(left, field), getattr(right, field)
            if not isinstance(mine, dict):
                if mine != other:
                    yield f"{name}/{field}"
                continue
            for key in sorted(mine.keys() | other.keys()):
                if not (key in mine and key in other and _same_value(mine[key], other[key])):
                    yield f"{name}/{field}/{key}"


def _same_value(left: bytes | np.ndarray, right: bytes | np.ndarray) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return _same_bytes(left, right)
    return bool(left == right) if type(left) is type(right) else False


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; the exit code says it, too (0 the same, 19 different, 17 does not verify, 28 a key)."""
    parser = argparse.ArgumentParser(prog="verl_slurm.dcp.compare", description=__doc__.splitlines()[0])
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--key-file", type=Path, help="the key of both, instead of what their runs say")
    options = parser.parse_args(argv)
    try:
        keys_a, keys_b = (keys_for(side, options.key_file) for side in (options.a, options.b))
        result = compare(options.a, options.b, keys_a, keys_b)
    except VerlSlurmError as error:
        sys.stderr.write(f"{error.one_line()}\n")
        return int(error.exit_code)
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode({"same": result.same, **asdict(result)}) + b"\n")
    else:
        for name in result.differing:
            sys.stdout.write(f"differs: {name}\n")
        verdict = "the same, bit for bit" if result.same else f"{len(result.differing)} differ"
        sys.stdout.write(f"{result.num_tensors} tensors, {result.num_bytes} bytes: {verdict}\n")
    return int(ExitCode.OK if result.same else ExitCode.DIFFERENT)


if __name__ == "__main__":
    sys.exit(main())
