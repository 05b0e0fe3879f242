"""How fast chunks are sealed and opened on one core, next to SHA-256 and a copy of the same bytes.

python benchmarks/encryption.py [--mib 256] [--rounds 5] [--directory DIR]

With a directory: also how fast the saver makes a file durable there, and the reader checks and loads it, with a
key and without, by the clock and by the CPU seconds of all threads.

The rounds are interleaved. The buffers are larger than the caches, and CPU seconds are counted, so that a
busy machine does not decide. `pause` is the longest time for which a second thread did not run while one call
worked on all of the bytes: far below the time of the call when the interpreter lock is given back.
"""

import argparse
import ctypes
import hashlib
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from verl_slurm.base.keys import MasterKey, Secret
from verl_slurm.checkpoint.format.encryption import (
    SEALED_CHUNK_BYTES,
    CheckpointCipher,
    ChunkOpener,
    ChunkSealer,
)
from verl_slurm.checkpoint.store.chunks import Reading, Wanted, read_checked
from verl_slurm.save.writer.arena import Arena
from verl_slurm.save.writer.file_sealing import Sealer
from verl_slurm.save.writer.protocol import ArenaFile, Sealing
from verl_slurm.save.writer.writing import write_and_hash


def _parts(count: int) -> list[slice]:
    return [slice(i * SEALED_CHUNK_BYTES, (i + 1) * SEALED_CHUNK_BYTES) for i in range(count)]


def _seal(key: Secret, plain: memoryview, out: memoryview) -> list[bytes]:
    sealer = ChunkSealer(key, "file", len(plain))
    return [sealer.seal_into(i, plain[part], out[part]) for i, part in enumerate(_parts(sealer.num_chunks))]


def _open(key: Secret, sealed: memoryview, tags: list[bytes], out: memoryview) -> None:
    opener = ChunkOpener(key, "file", len(sealed))
    for i, (tag, part) in enumerate(zip(tags, _parts(len(tags)), strict=True)):
        opener.open_into(i, sealed[part], tag, out[part])


def _pause(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the call, and the longest gap in a second thread meanwhile."""
    thread = threading.Thread(target=work)
    began = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return time.perf_counter() - began, longest


def _on_disk(directory: Path, size: int, rounds: int) -> None:
    """Save and load one file of `size` bytes, plain and encrypted in turn."""
    key = MasterKey(bytes(range(32)))
    arena, target = Arena(size), Arena(size)
    arena.fault_in()
    target.fault_in()
    address = ctypes.addressof(ctypes.c_char.from_buffer(target.view))
    arena.view[:] = os.urandom(1 << 20) * (size >> 20)
    file = ArenaFile(path="rank_0000.bin", at=0, size=size)
    seconds: dict[str, list[float]] = {}
    sealer = Sealer(key)
    for _ in range(rounds):
        for name in ("plain", "encrypted"):
            cipher = CheckpointCipher.begin(key, "bench") if name == "encrypted" else None
            began = time.perf_counter()
            sealed = None
            if cipher is not None:
                sealing = Sealing(name="bench", encryption=cipher.record)
                sealed = sealer.begin(sealing, arena.view, [file])
            before = time.process_time()
            (entry,), (outcome,) = write_and_hash(arena.view, [file], [str(directory)], sealed=sealed)
            seconds.setdefault(f"save, {name}", []).append(time.perf_counter() - began)
            seconds.setdefault(f"save, {name}, CPU", []).append(time.process_time() - before)
            assert outcome.error is None, outcome.error
            root = os.open(directory, os.O_RDONLY)
            reading = Reading(entry, [Wanted(0, size, address)], cipher.opener(entry) if cipher else None)
            for threads in (1, 2):
                began, before = time.perf_counter(), time.process_time()
                read_checked(root, [reading], threads=threads, on_problem=_fail)
                seconds.setdefault(f"load, {name}, threads: {threads}", []).append(
                    time.perf_counter() - began
                )
            seconds.setdefault(f"load, {name}, CPU", []).append(time.process_time() - before)
            os.close(root)
            (directory / file.path).unlink()
            assert target.view[: 1 << 20] == arena.view[: 1 << 20]
    for name, measured in sorted(seconds.items()):
        middle = statistics.median(measured)
        print(f"{name:<28} {size / middle / 1e9:6.2f} GB/s   ({min(measured):.3f} to {max(measured):.3f} s)")


def _fail(path: str, what: object) -> None:
    raise AssertionError(f"{path}: {what}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the file system to save to")
    options = parser.parse_args()
    size = options.mib << 20
    plain, out, back = (memoryview(bytearray(size)) for _ in range(3))
    key = MasterKey(bytes(range(32))).derive(b"benchmark")
    tags = _seal(key, plain, out)
    _open(key, out, tags, back)

    def copy() -> None:
        back[:] = plain

    works: dict[str, Callable[[], object]] = {
        "seal": lambda: _seal(key, plain, out),
        "open": lambda: _open(key, out, tags, back),
        "sha256": lambda: hashlib.sha256(plain).digest(),
        "copy": copy,
    }
    speeds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, work in works.items():
            began = time.thread_time()
            work()
            speeds[name].append(size / (time.thread_time() - began) / 1e9)
    for name, measured in speeds.items():
        low, middle, high = min(measured), statistics.median(measured), max(measured)
        print(f"{name:<7} {middle:6.2f} GB/s of one core   ({low:.2f} to {high:.2f})")
    one, sealed_one = (view[:SEALED_CHUNK_BYTES] for view in (plain, out))
    its_tags = _seal(key, one, sealed_one)
    for name, work in (
        ("seal", lambda: _seal(key, one, sealed_one)),
        ("open", lambda: _open(key, sealed_one, its_tags, back[:SEALED_CHUNK_BYTES])),
    ):
        took, longest = min((_pause(work) for _ in range(options.rounds)), key=lambda pair: pair[1])
        print(f"{name:<7} one call of {took * 1e3:.1f} ms, pause of another thread {longest * 1e3:.2f} ms")
    if options.directory is not None:
        _on_disk(options.directory, size, options.rounds)


if __name__ == "__main__":
    main()
