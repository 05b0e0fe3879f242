"""The job of a fire drill: `python -m verl_slurm.checks.drill_job (batch|node) DIR`. It records what happens to it.

The batch process starts one step with a process on each node. Each process blocks all signals that Slurm may send,
takes them one by one, and records them, with a sign of life every 0.2 s, until it is killed, or DIR/over exists.
After its requeue (SLURM_RESTART_COUNT) the batch process says so and ends.

```
DIR/node-<id>.json     NodeReport of a node
DIR/clock              address at which node 0 tells the time
DIR/<who>.seen         one line per signal: `NAME SECONDS-SINCE-1970`; <who> is `batch` or `step-<id>`
DIR/<who>.alive        its modification time is the last sign of life
DIR/again              first message after the requeue: seconds since 1970
DIR/problem            why the job gave up by itself
DIR/over               made by the drill: the job ends
```
"""

import os
import platform
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from verl_slurm.base.files import write_file
from verl_slurm.checks import Finding, run_checks
from verl_slurm.checks.node_look import CHECKS, NodeProbes, Order
from verl_slurm.checks.storage_probe import PlaceReport, probe_place

_TAKEN = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGHUP)
_BEAT_S = 0.2
_AT_MOST_S = 600.0
_CLOCK_PATIENCE_S = 30.0

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
    """What a run's agent would find of the GPUs (`checks.node_look`)."""
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
        gpus=tuple(run_checks(CHECKS, "doctor", NodeProbes(Order(gpus=True))).findings),
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
    """Returns (offset, round trip) in seconds; `address`: `HOST PORT`, as node 0 published it. May raise OSError.

    The offset is node 0's clock minus the middle of the question, as in NTP (RFC 5905, section 8); its error is at
    most half the round trip.
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


def main(argv: list[str]) -> int:
    """Runs one process of the drill; see the module."""
    role, directory = argv[0], Path(argv[1])
    os.umask(0o077)
    # Before all else: until then USR1 would end the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    if role == "node":
        return _node(directory, int(os.environ.get("SLURM_NODEID") or 0), argv[2] if len(argv) > 2 else "")
    # Unset on the first run.
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        write_file(directory / "again", str(time.time()).encode())
        return 0
    srun = shutil.which("srun")
    if srun is None:
        write_file(directory / "problem", b"there is no srun on the first node")
        return 1
    mine = [sys.executable, "-P", "-m", __name__, "node", *argv[1:]]
    log = os.open(directory / "step.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # The mask is inherited: srun relays no signal of its own, and dies with the job.
    step = subprocess.Popen(
        # The end of one node's process must not end the others', which record the signals.
        [srun, "--kill-on-bad-exit=0", *mine],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    os.close(log)
    _watch(directory, "batch", step)
    return 0


def _node(directory: Path, node_id: int, local_dir: str) -> int:
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    report = look_at_node(name, local_dir)
    address, server = directory / "clock", None
    if node_id == 0:
        # Listens before its address is published by the file.
        server = ClockServer(address, own_address())
    else:
        try:
            offset, took = ask_clock(_published(address))
            report = msgspec.structs.replace(report, clock_offset_s=offset, round_trip_s=took)
        except (OSError, ValueError) as error:
            # A finding, not the drill's end: the other nodes have theirs to report.
            report = msgspec.structs.replace(report, problem=str(error) or type(error).__name__)
    write_file(directory / f"node-{node_id}.json", msgspec.json.encode(report))
    _watch(directory, f"step-{node_id}", None)
    if server is not None:
        server.close()
    return 0


def own_address() -> str:
    """Returns the address by which other nodes reach this one; a loopback address if there is no other."""
    environ = os.environ
    found = []
    for name in (
        environ.get("SLURMD_NODENAME"),
        socket.gethostname(),
        # srun's, which runs on this node as well.
        environ.get("SLURM_LAUNCH_NODE_IPADDR"),
    ):
        try:
            if name:
                found += [str(a[4][0]) for a in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except OSError:
            continue
    return next((a for a in found if not a.startswith("127.") and a != "::1"), (found or ["127.0.0.1"])[0])


def _published(path: Path) -> str:
    deadline = time.monotonic() + _CLOCK_PATIENCE_S
    while time.monotonic() < deadline:
        # Polled: shared file systems do not report a new file.
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(_BEAT_S)
    raise OSError("the first node never said where it listens")


def _watch(directory: Path, who: str, step: "subprocess.Popen[bytes] | None") -> None:
    seen = os.open(directory / f"{who}.seen", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    alive = directory / f"{who}.alive"
    deadline = time.monotonic() + _AT_MOST_S
    # Bounded: a drill that was killed itself makes no `over`.
    while time.monotonic() < deadline and not (directory / "over").exists():
        alive.touch(mode=0o600)
        took = signal.sigtimedwait(_TAKEN, _BEAT_S)
        if took is not None:
            os.write(seen, f"{signal.Signals(took.si_signo).name} {time.time()}\n".encode())
        if step is not None:
            step.poll()
    os.close(seen)
    if step is not None:
        step.wait()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
