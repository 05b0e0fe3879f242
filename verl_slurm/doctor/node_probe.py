"""Describes one node as a process on it sees it, and tests whether the nodes reach one another.

Node 0 listens on a free port and answers with the time; the others ask it. One exchange shows that ports are open
between nodes, and how far the clocks are apart. The offset is their clock minus the middle of the question, as in NTP
(RFC 5905, section 8); its error is at most half the round trip.
"""

import os
import platform
import resource
import shutil
import socket
import struct
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from verl_slurm.base.files import write_file
from verl_slurm.doctor.storage_probe import PlaceReport, probe_place
from verl_slurm.health import Finding
from verl_slurm.health.gpus import look_at_gpus

_PACKAGES = ("verl-slurm", "torch", "transformers", "vllm", "msgpack", "zstandard", "numpy")
_TIME = struct.Struct("!d")
_PATIENCE_S = 10.0
_LOCAL_BYTES = 16 << 20


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one node."""

    node: str
    python: str
    packages: dict[str, str]
    driver: str
    """NVIDIA's driver version; empty: none."""
    num_gpus: int
    open_files: int
    """The soft limit (`ulimit -n`)."""
    shm_free_bytes: int
    problem: str = ""
    """Why node 0 could not be reached; empty: it was, or this is node 0."""
    clock_offset_s: float | None = None
    """Node 0's clock minus this one's, in seconds. None: node 0, or not reached."""
    round_trip_s: float | None = None
    gpus: tuple[Finding, ...] = ()
    """What a run's agent would find of the GPUs (`verl_slurm.health.gpus`)."""
    local: PlaceReport | None = None
    """checkpoint.local_dir, if one is configured."""


def look_at_node(node: str, local_dir: str) -> NodeReport:
    """Collects everything except the exchange with node 0."""
    driver = Path("/proc/driver/nvidia/version")
    gpus = Path("/proc/driver/nvidia/gpus")
    return NodeReport(
        node=node,
        python=platform.python_version(),
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        driver=driver.read_text().split("\n", 1)[0] if driver.exists() else "",
        num_gpus=len(list(gpus.iterdir())) if gpus.is_dir() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,  # noqa: S108
        gpus=tuple(look_at_gpus(lambda _: None, os.environ, required=False, foreign=True)),
        local=probe_place(Path(local_dir), _LOCAL_BYTES) if local_dir else None,
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


class ClockServer:
    """Node 0's server: answers each connection with eight bytes, the time. Publishes `HOST PORT` in a file."""

    def __init__(self, address: Path, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # On all interfaces: on the node itself, its name may mean 127.0.1.1. It tells the time and nothing else.
        self._socket = socket.create_server(("", 0), family=family)
        write_file(address, f"{host} {self._socket.getsockname()[1]}".encode())
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
                with peer:
                    peer.settimeout(_PATIENCE_S)
                    peer.sendall(_TIME.pack(time.time()))
            except OSError:
                # Closed by `close`; any other error is one peer's.
                if self._socket.fileno() < 0:
                    return

    def close(self) -> None:
        self._socket.close()


def ask_clock(address: str) -> tuple[float, float]:
    """Returns (offset, round trip) in seconds.

    Args:
        address: `HOST PORT`, as node 0 published it.

    Raises:
        OSError: it cannot be reached, or gives another answer.
    """
    host, _, port = address.rpartition(" ")
    # The round trip by the steady clock; the wall clock may be set in between.
    began, asked = time.perf_counter(), time.time()
    with socket.create_connection((host, int(port)), timeout=_PATIENCE_S) as link:
        said = b""
        while len(said) < _TIME.size:
            more = link.recv(_TIME.size - len(said))
            if not more:
                raise OSError("closed without an answer")
            said += more
    took = time.perf_counter() - began
    return _TIME.unpack(said)[0] - (asked + took / 2), took
