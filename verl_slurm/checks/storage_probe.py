"""Tests a place for checkpoints: whether it exists, which of our requirements it meets, and how fast it is.

It makes a directory of its own there (0700, a random name), writes, syncs, renames, locks and reads files, and
removes all of it. An operation that fails is a finding, never an exception.
"""

import fcntl
import os
import secrets
import shutil
import stat
import time
from pathlib import Path

import msgspec

from verl_slurm.base.files import open_new, rename
from verl_slurm.base.kernel_facts import file_system
from verl_slurm.checks import Finding, bad, good, warn

_BYTES = 64 << 20
_PIECE = 4 << 20
_SMALL_SYNCS = 16
_SLOW_SYNC_S = 0.05
_MEMORY = ("tmpfs", "ramfs")


class PlaceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The observations about one place."""

    path: str
    problem: str = ""
    """Why nothing else is known."""
    medium: str = ""
    """The file system's type."""
    free_bytes: int = 0
    write_bytes_per_s: float = 0.0
    """64 MiB in one file, fsync included."""
    sync_s: float = 0.0
    """Time to make a small append durable: the median."""
    keeps_modes: bool = True
    renames: bool = True
    locks: bool = True


def probe_place(place: Path, num_bytes: int = _BYTES) -> PlaceReport:
    """Tests `place`. If it does not exist, its nearest existing parent is tested; nothing that is made stays."""
    parent = place
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    # A random name, made by mkdir: nothing that lies there already is written to or removed.
    trial = parent / f".verl-slurm-doctor-{secrets.token_hex(6)}"
    try:
        trial.mkdir(mode=0o700)
    except OSError as error:
        return PlaceReport(path=str(place), problem=f"{parent}: {error.strerror or error}")
    try:
        return _try(place, trial, num_bytes)
    except OSError as error:
        return PlaceReport(path=str(place), problem=f"{parent}: {error.strerror or error}")
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _try(place: Path, trial: Path, num_bytes: int) -> PlaceReport:
    block = memoryview(secrets.token_bytes(_PIECE))  # some file systems would compress zeros away
    big, target = trial / "new", trial / "old"
    fd = open_new(big)
    try:
        began, written = time.perf_counter(), 0
        while written < num_bytes:
            written += os.write(fd, block[: num_bytes - written])
        os.fsync(fd)  # noqa: TID251 - it is what is measured
        speed = written / max(time.perf_counter() - began, 1e-9)
        # Appends, because a ledger's record makes the file longer, too: that is more than data to sync.
        syncs = sorted(_small_sync(fd, written + i) for i in range(_SMALL_SYNCS))
        # File systems without owners and modes (vfat, some of FUSE and SMB) show what they were mounted with.
        keeps = stat.S_IMODE(os.fstat(fd).st_mode) == 0o600 and stat.S_IMODE(trial.stat().st_mode) == 0o700
        locks = _locks(fd)
    finally:
        os.close(fd)
    # Renamed onto an existing name, as the hint to the newest checkpoint is.
    target.write_bytes(b"")
    rename(big, target, durable=False)
    renamed = target.stat().st_size >= written and not big.exists()
    return PlaceReport(
        path=str(place),
        medium=file_system(trial),
        free_bytes=shutil.disk_usage(trial).free,
        write_bytes_per_s=speed,
        sync_s=syncs[len(syncs) // 2],
        keeps_modes=keeps,
        renames=renamed,
        locks=locks,
    )


def _small_sync(fd: int, offset: int) -> float:
    began = time.perf_counter()
    os.pwrite(fd, b"x", offset)
    os.fdatasync(fd)
    return time.perf_counter() - began


def _locks(fd: int) -> bool:
    try:
        # No other process has this file, so a refusal means that there are no locks (Lustre without `-o flock`).
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def judge_place(topic: str, report: PlaceReport, *, must_outlive_node: bool) -> list[Finding]:
    """Returns the findings of a report. Pure.

    `topic`: the key that names the place; `must_outlive_node`: the run resumes from there on another node.
    """
    if report.problem:
        return [bad(topic, f"{report.path}: {report.problem}", f"choose another {topic}, or have it mended")]
    speed, sync = report.write_bytes_per_s / 1e6, report.sync_s * 1e3
    found = (
        f"{report.path} ({report.medium or 'unknown'}): {report.free_bytes / 1e9:.3g} GB free, "
        f"writes {speed:.0f} MB/s, a small write is durable after {sync:.1f} ms"
    )
    findings = [good(topic, found)]
    # Memory is lost with its node, and no other node sees it.
    if must_outlive_node and report.medium in _MEMORY:
        findings[0] = warn(topic, f"{found}: it is this machine's memory", "a directory that all nodes share")
    place, another = report.path, f"choose another {topic}"
    slow = "the ledger pays it for each micro-batch: a greater rollout.micro_batch_size_per_device"
    alone = "the attempt's number alone keeps two attempts apart (Lustre: -o flock)"
    readable = "others may read checkpoints: encrypt them (key)"
    judged = (
        (report.keeps_modes, warn(topic, f"{place} does not keep file modes", readable)),
        (report.renames, bad(topic, f"{place} does not rename atomically", another)),
        (report.locks, warn(topic, f"{place} has no flock", alone)),
        (
            report.sync_s <= _SLOW_SYNC_S,
            warn(topic, f"{place}: {sync:.0f} ms until a small write is durable", slow),
        ),
    )
    return [*findings, *(found for is_good, found in judged if not is_good)]
