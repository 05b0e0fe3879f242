"""Are two checkpoints the same, bit for bit? `python -m verl_slurm.save.ranks.compare DIR_A DIR_B [--json]`

Compared are all weights and all optimizer state, tensor by tensor and byte by byte (so NaN equals the same
NaN, and 0.0 differs from -0.0), and with them the schedulers and each rank's runtime state: position,
generators, KL window, rollouts, buffers, metric history. Not compared is what must differ: times, attempts,
parents. Both directories are verified first.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.format.tensor_index import TensorEntry, slabs
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.runtime_state.codec import facts
from verl_slurm.runtime_state.format import RUNTIME_STATE_FILE
from verl_slurm.save.ranks.loader import WholeReader
from verl_slurm.save.ranks.tensors import Tensors

_GROUP_BYTES = 32 << 20
"""Tensors are compared in slabs and groups of so many bytes at most: how large one is, a stranger may have said."""


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
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


def compare(
    a: Path, b: Path, keys_a: Keyring | None = None, keys_b: Keyring | None = None
) -> TensorComparison:
    """Compare two checkpoint directories.

    Args:
        keys_a, keys_b: of the two, where they are encrypted.

    Raises:
        KeyRefused: a key is missing, or another one.
        CheckpointCorrupt: one of them does not verify.
    """
    # Both are verified before either is opened: what is compared is what was committed.
    domains: list[set[str]] = []
    for directory, keys in ((a, keys_a), (b, keys_b)):
        verdict = verify(directory, keys=keys)
        if verdict.needs_key:
            CheckpointReader(directory, keys)  # raises, and says which
        remedy = "compare checkpoints that verify (verl-slurm verify DIR)"
        manifest = verdict.require("a checkpoint to compare does not verify", directory, remedy)
        domains.append(set(manifest.domains))
    differing = [f"{domain}/ (only in one)" for domain in sorted(domains[0] ^ domains[1])]
    num_tensors = num_bytes = 0
    for domain in sorted(domains[0] & domains[1]):
        # One reader for a domain: its index is parsed once, not once a group.
        left, right = WholeReader(a, domain, keys_a), WholeReader(b, domain, keys_b)
        mine, other = left.index.tensors, right.index.tensors
        differing += [f"{domain}/{name} (only in one)" for name in sorted(mine.keys() ^ other.keys())]
        common = sorted(mine.keys() & other.keys())
        alike = [
            name
            for name in common
            if (mine[name].dtype, mine[name].shape) == (other[name].dtype, other[name].shape)
        ]
        differing += [f"{domain}/{name} (shape or type)" for name in common if name not in set(alike)]
        num_tensors += len(alike)
        num_bytes += sum(mine[name].num_bytes for name in alike)
        unlike = {
            names[slab]
            for names, ours, theirs in _groups((name, mine[name], other[name]) for name in alike)
            for slab in _unlike(left.read_entries(ours), right.read_entries(theirs))
        }
        differing += [f"{domain}/{name}" for name in alike if name in unlike]
    differing += _compare_small(a, b, CheckpointReader(a, keys_a), CheckpointReader(b, keys_b))
    return TensorComparison(
        a=str(a), b=str(b), num_tensors=num_tensors, num_bytes=num_bytes, differing=tuple(differing)
    )


_Slabs = dict[str, TensorEntry]


def _groups(
    pairs: Iterable[tuple[str, TensorEntry, TensorEntry]],
) -> Iterator[tuple[dict[str, str], _Slabs, _Slabs]]:
    """Slabs of both sides to be read at once; the first says of which tensor each is."""
    names: dict[str, str] = {}
    left: _Slabs = {}
    right: _Slabs = {}
    size = 0
    for name, mine, other in pairs:
        # Cut by type and shape alone, which are alike: the slabs of both sides match, however each was sharded.
        for ours, theirs in zip(slabs(mine, _GROUP_BYTES), slabs(other, _GROUP_BYTES), strict=True):
            if size + ours.num_bytes > _GROUP_BYTES:
                yield names, left, right
                names, left, right, size = {}, {}, {}, 0
            # A number: one tensor may have several slabs in a group, and its name can be any text.
            slab = str(len(names))
            names[slab], left[slab], right[slab] = name, ours, theirs
            size += ours.num_bytes
    # The rest, which fills no group.
    yield names, left, right


def _unlike(left: Tensors, right: Tensors) -> Iterator[str]:
    for slab, mine in left.items():
        # As bytes: torch has no comparison of its own that tells NaN from NaN and 0.0 from -0.0.
        ours, theirs = (tensor.reshape(-1).view(torch.uint8) for tensor in (mine, right[slab]))
        if not torch.equal(ours, theirs):
            yield slab


def _compare_small(a: Path, b: Path, in_a: CheckpointReader, in_b: CheckpointReader) -> Iterator[str]:
    """Schedulers and runtime states; yields the names of what differs."""
    if in_a.read("scheduler.json") != in_b.read("scheduler.json"):
        yield "scheduler.json"
    # From both sides: the two may have been saved by different numbers of ranks.
    names = {path.name for side in (a, b) for path in side.iterdir()}
    for name in sorted(filter(RUNTIME_STATE_FILE.fullmatch, names)):
        if not ((a / name).exists() and (b / name).exists()):
            yield f"{name} (only in one)"
            continue
        mine, other = (
            # By digests of its arrays, through a window: a state of some MB may expand to 2 GiB.
            facts(reader.window(name), reader.plain_size(name), where=side / name)
            for side, reader in ((a, in_a), (b, in_b))
        )
        yield from (
            f"{name}/{fact}"
            for fact in sorted(mine.keys() | other.keys())
            if mine.get(fact) != other.get(fact)
        )


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; the exit code says it, too (0 the same, 19 different, 17 does not verify, 28 a key)."""
    parser = argparse.ArgumentParser(
        prog="verl_slurm.save.ranks.compare", description=__doc__.splitlines()[0]
    )
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--key-file", type=Path, help="the key of both, instead of what their runs say")
    options = parser.parse_args(argv)
    try:
        # Of each side's own run: two runs may have two keys.
        keys_a, keys_b = (keys_for(side, options.key_file) for side in (options.a, options.b))
        result = compare(options.a, options.b, keys_a, keys_b)
    except VerlSlurmError as error:
        # One line: the parent process takes the last one for its own error.
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
