"""Where the time of a save and of a load goes: the same calls with one part after the other taken away.

python -m benchmarks.where_time_goes --directory DIR [--gib 1.0] [--rounds 5] [--json FILE]

One process with a thread a core, where a job has a rank a core; no collectives, no commit. The rounds are
interleaved; each figure is the median, by the clock and in CPU seconds of all threads.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import stringzilla

from benchmarks.save.machine import drop_caches
from benchmarks.save.reading import read_all
from verl_slurm.base.files import num_threads
from verl_slurm.base.tree import open_directory
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.checkpoint.hashing import Hasher, process_hasher
from verl_slurm.checkpoint.store.chunks import Reading, Wanted, read_checked
from verl_slurm.save.writer.arena import Arena
from verl_slurm.save.writer.protocol import ArenaFile
from verl_slurm.save.writer.writing import write_and_hash

Part = Callable[[], object]


@dataclass(frozen=True)
class _Nothing(Hasher):
    """Hashes nothing: takes every chunk for what it should be. All chunks here are alike."""

    digest: bytes = b""

    def digests(self, pieces: Sequence[memoryview]) -> list[bytes]:
        return [self.digest for _ in pieces]


class _Save:
    """One state in an arena, as two files."""

    def __init__(self, directory: Path, size: int) -> None:
        self._directory = directory
        self._arena = Arena(size)
        self._arena.fault_in()
        self._arena.view[:] = os.urandom(1 << 20) * (size >> 20)
        half = size // 2
        self._files = [ArenaFile(path=f"part/rank_{i:04d}.bin", at=i * half, size=half) for i in range(2)]
        self._live = bytearray(self._arena.view)

    def run(self, hasher: Hasher, *, write: bool = True) -> tuple[FileEntry, ...]:
        where = [str(self._directory)] if write else []
        entries, outcomes = write_and_hash(
            self._arena.view, self._files, where, hashers=num_threads(), hasher=hasher
        )
        assert all(outcome.error is None for outcome in outcomes)
        return entries

    def tidy(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(mode=0o700)
        os.sync()

    def copy(self) -> None:
        source = ctypes.addressof(ctypes.c_char.from_buffer(self._live))
        target = ctypes.addressof(ctypes.c_char.from_buffer(self._arena.view))
        ctypes.memmove(target, source, len(self._live))


class _Load:
    """The files of a save, read in several ways."""

    def __init__(self, directory: Path, entries: tuple[FileEntry, ...]) -> None:
        self._directory, self._entries = directory, entries
        self._paths = [directory / entry.path for entry in entries]
        self._warm = [bytearray(entry.size) for entry in entries]

    def plain(self) -> None:
        read_all(self._paths, num_threads())

    def checked(self, hasher: Hasher, into: str = "nowhere") -> None:
        held: list[object] = []
        readings = []
        for entry, warm in zip(self._entries, self._warm, strict=True):
            wanted = None
            if into != "nowhere":
                memory = warm if into == "warm" else _fresh(entry.size)
                address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                held.append(memory)
                wanted = [Wanted(0, entry.size, address)]
            readings.append(Reading(entry, wanted))
        problems: list[object] = []
        with open_directory(self._directory) as root:
            read_checked(root, readings, on_problem=lambda *problem: problems.append(problem), hasher=hasher)
        assert not problems, problems


def _fresh(size: int) -> "ctypes.Array[ctypes.c_char]":
    """Memory that nobody has touched: large allocations come from the kernel."""
    return (ctypes.c_char * size).from_buffer(mmap.mmap(-1, size))


def _timed(part: Part) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    part()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = int(options.gib * 1024) >> 3 << 23
    save = _Save(options.directory / "where_time_goes", size)
    one_by_one, side_by_side = Hasher(), Hasher(stringzilla.Sha256s)
    save.tidy()
    entries = save.run(one_by_one)
    nothing = _Nothing(digest=bytes.fromhex(entries[0].leaves[0]))
    load = _Load(options.directory / "where_time_goes", entries)
    saves: dict[str, Part] = {
        "copy into the arena, one thread": save.copy,
        "hash, hashlib": lambda: save.run(one_by_one, write=False),
        "hash, side by side": lambda: save.run(side_by_side, write=False),
        "write": lambda: save.run(nothing),
        "write, hash with hashlib": lambda: save.run(one_by_one),
        "write, hash side by side": lambda: save.run(side_by_side),
    }
    loads: dict[str, Part] = {
        "plain read": load.plain,
        "our read, nothing hashed": lambda: load.checked(nothing),
        "our read, hashlib (verify)": lambda: load.checked(one_by_one),
        "our read, side by side (verify)": lambda: load.checked(side_by_side),
        "copied into warm memory, nothing hashed": lambda: load.checked(nothing, into="warm"),
        "copied into fresh memory, nothing hashed": lambda: load.checked(nothing, into="fresh"),
        "copied into fresh memory, hashlib (load)": lambda: load.checked(one_by_one, into="fresh"),
        "copied into fresh memory, side by side (load)": lambda: load.checked(side_by_side, into="fresh"),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*saves, *loads)}
    for _ in range(options.rounds):
        for name, part in saves.items():
            save.tidy()
            found[name].append(_timed(part))
        for name, part in loads.items():
            drop_caches()
            found[name].append(_timed(part))
    shutil.rmtree(options.directory / "where_time_goes")
    print(
        f"{size / 2**30:.2f} GiB, {num_threads()} threads, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}; "
        f"{' '.join(stringzilla.__capabilities__)}: at once: {process_hasher().at_once} in a save, "
        f"{process_hasher(reading=True).at_once} in a reading"
    )
    print(f"{'':46}  seconds  (least..greatest)  CPU s")
    rows = {}
    for name, pairs in found.items():
        walls, cpus = zip(*pairs, strict=True)
        rows[name] = {"seconds": statistics.median(walls), "cpu_seconds": statistics.median(cpus)}
        print(
            f"{name:46}  {statistics.median(walls):.3f}    ({min(walls):.3f}..{max(walls):.3f})"
            f"    {statistics.median(cpus):.3f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
