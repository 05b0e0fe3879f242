"""The job of a fire drill: `python -m verl_slurm.doctor.drill_job (batch|node) DIR`. It records what happens to it.

The batch process starts one step with a process on each node. Then it and these processes all do the same. Each
blocks all signals that Slurm may send, takes them one by one, and records them, with a sign of life every 0.2 s. It
goes on until it is killed, or until DIR/over exists. After its requeue (SLURM_RESTART_COUNT) it says so and ends.

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
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from verl_slurm.base.files import write_file
from verl_slurm.doctor.node_probe import ClockServer, ask_clock, look_at_node

_TAKEN = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGHUP)
_BEAT_S = 0.2
_AT_MOST_S = 600.0
_CLOCK_PATIENCE_S = 30.0


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
        server = ClockServer(address, _own_address())
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


def _own_address() -> str:
    """Returns the address by which other nodes reach this one: its name in Slurm if that resolves, else the host's,
    else srun's, which runs on this node as well. A name may mean 127.0.1.1 on the node itself; a loopback address is
    returned if there is no other.
    """
    environ = os.environ
    found = []
    for name in (
        environ.get("SLURMD_NODENAME"),
        socket.gethostname(),
        environ.get("SLURM_LAUNCH_NODE_IPADDR"),
    ):
        try:
            if name:
                found += [str(a[4][0]) for a in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except OSError:
            continue
    return next((a for a in found if not a.startswith("127.") and a != "::1"), (found or ["127.0.0.1"])[0])


def _published(path: Path) -> str:
    """Waits for node 0. Polls, because shared file systems do not report a new file."""
    deadline = time.monotonic() + _CLOCK_PATIENCE_S
    while time.monotonic() < deadline:
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
