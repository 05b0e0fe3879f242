"""Keeping noise out, and saying how much was there: idle gate, load, caches, CPU and memory of a process tree.

Linux only. Torch-free: the launcher uses it, too.
"""

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from benchmarks.save.records import Environment

_DROP = Path("/proc/sys/vm/drop_caches")
_PACKAGES = (
    *(
        "torch",
        "transformers",
        "safetensors",
        "nvidia-resiliency-ext",
        "bytecheckpoint",
        "torchsnapshot-nightly",
    ),
    *("numpy", "msgspec", "psutil"),
)


def wait_until_idle(*, at_most_s: float, share: float = 0.85) -> float:
    """Wait until the cores are mostly idle, so that nobody else's work is measured.

    Returns:
        The idle share (0..1) seen last; the sample carries it, whether it was enough or not.
    """
    deadline = time.monotonic() + at_most_s
    while True:
        idle = 1.0 - psutil.cpu_percent(interval=min(0.25, max(at_most_s, 0.01))) / 100.0
        if idle >= share or time.monotonic() >= deadline:
            return idle


def can_drop_caches() -> bool:
    return os.access(_DROP, os.W_OK)


def drop_caches() -> None:
    """Write back and forget the guest's page cache (root only, else nothing).

    A hypervisor's cache, if there is one below, is not reached: "cold" is what this machine can make cold.
    """
    os.sync()
    if can_drop_caches():
        _DROP.write_text("3")


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process, of its reaped children and of its living descendants."""
    total = 0.0
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0.0
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it ended meanwhile; what it used is among its parent's reaped children
        total += times.user + times.system + times.children_user + times.children_system
    return total


def tree_pss(pids: Iterable[int]) -> int:
    """Proportional set size in bytes of process trees: shared pages are counted once over the sharers."""
    total = 0
    for pid in pids:
        try:
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
        except psutil.Error:
            continue
        for process in family:
            try:
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            except OSError:
                continue
            found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
            total += int(found[1]) * 1024 if found else 0
    return total


def fsync_tree(root: Path) -> None:
    """Make every file and directory below `root`, and its own name, durable. For peers that do not do it."""
    for directory, _, files in os.walk(root):
        for name in [*files, "."]:
            _fsync(Path(directory) / name)
    _fsync(root.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def tree_bytes(root: Path) -> int:
    """Sizes of all files below `root`, together."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def environment(directories: Iterable[Path]) -> Environment:
    """What a reader of the figures has to know of this machine."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return Environment(
        cpu=model[1] if model else platform.machine(),
        cores=os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        kernel=platform.release(),
        file_systems={str(d): _file_system(d) for d in directories},
        load_before=os.getloadavg(),
        caches_dropped=can_drop_caches(),
        versions={"python": platform.python_version(), **_versions()},
        commit=_commit(),
        started_utc=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _file_system(directory: Path) -> str:
    best = max(
        (
            part
            for part in psutil.disk_partitions(all=True)
            if directory.resolve().is_relative_to(part.mountpoint)
        ),
        key=lambda part: len(part.mountpoint),
        default=None,
    )
    return f"{best.fstype} on {best.device}" if best else "unknown"


def _commit() -> str:
    """The commit of the tree this runs from, `+` when it was changed; empty without git."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=10"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip()


assert sys.platform == "linux", "the benchmark reads /proc"
