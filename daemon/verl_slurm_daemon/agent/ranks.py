"""Launches one node's ranks: starts them, waits, and ends all of them soon after one has failed.

It stands where torchrun would: its ranks get the same environment. It has no store and no listener, restarts
nothing and decides nothing. The agent started it with Slurm's warnings ignored, which its ranks inherit. It
dies with its agent, and its ranks die with it (`wire.lifeline`). Its exit code is 0 if each rank's was, else
1. Its last line on stderr says what ended the first rank that failed.

    python -P -m verl_slurm_daemon.agent.ranks NODES NODE_RANK RANKS_PER_NODE [-m] PROGRAM ARGS...
    python -P -m verl_slurm_daemon.agent.ranks --stand-by NODES NODE_RANK RANKS_PER_NODE IMPORTS
    python -P -m verl_slurm_daemon.agent.ranks --service PROGRAM ARGS...

The second form starts ranks that import what those before them did, and stand by (`rendezvous.rank_start`).
The arguments and the environment of the first form then come through standard input.

The third form runs a service, which is a program like another, and leaves nothing of it behind. The three
ends that can come alone:

* the service ends: this process ends what it left, and ends with its exit code;
* the host ends, killed or not: the kernel signals this process, which ends everything;
* this process is killed: the kernel kills the service, and its host, a subreaper, ends what it inherits.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType

import psutil

from verl_slurm.base.kernel_facts import oom_kills
from verl_slurm.base.processes import become_subreaper, die_with_parent
from verl_slurm.wire.environment import HOST_PID_VARIABLE, RESTART_VARIABLE, users_umask
from verl_slurm.wire.standing_by import Orders
from verl_slurm_daemon.descendants import WARNINGS, kill_tree

# A program that bypasses the run's own rendezvous fails instead of meeting strangers.
NOWHERE = "verl-slurm.invalid"
"""MASTER_ADDR, with port 0, for frameworks that require it. The name never resolves (RFC 2606)."""

_ANSWERS_S = 10.0
"""For a rank that stood by to take its orders, without any work of its own: 0.1 s if it lives. It may still import."""
_GRACE_S = 1.0
"""From the first rank's failure to SIGKILL for the others: time for their own error messages."""
_HOST_GONE = signal.SIGRTMIN + 4
"""What the kernel sends this process when a service's host ends. No program sends it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this node's ranks; returns 0 if all ended with 0. Of a service: its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    os.umask(users_umask())
    if words[0] == "--service":
        return _run_service(words[1:])
    if words[0] == "--stand-by":
        nodes, node_rank, here = map(int, words[1:4])
        return _stand_by(nodes, node_rank, here, words[4])
    return _run(words, os.environ, {})


def _stand_by(nodes: int, node_rank: int, here: int, imports: str) -> int:
    """Starts ranks that stand by, and waits for orders; without any, all end."""
    waiting: dict[int, subprocess.Popen[bytes]] = {}
    command = [sys.executable, "-P", "-m", "verl_slurm.loops.rendezvous", "--imports", imports]
    with suppress(
        OSError
    ):  # no memory, no processes: those that are missing are started when they are wanted
        for local_rank in range(here):
            # The variables by which libraries choose their threads and devices as they are imported.
            # `nodes` and `node_rank` are those that the orders will most likely have.
            environ = rank_environment(os.environ, nodes, node_rank, here, local_rank)
            waiting[local_rank] = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, start_new_session=True
            )
    data = sys.stdin.buffer.read()
    if not data:
        _kill({process.pid: rank for rank, process in waiting.items()})
        return 0
    orders = Orders.read(data)
    return _run(orders.words(), orders.variables(), waiting)


def _run(
    words: Sequence[str], whole: Mapping[str, str], waiting: Mapping[int, "subprocess.Popen[bytes]"]
) -> int:
    """Starts the ranks, or gives those that stand by (`waiting`, by local rank) their orders."""
    nodes, node_rank, here, *program = words
    ranks: dict[int, int] = {}
    # By way of our module, which replaces torch's rendezvous before the program imports torch (decision 0010).
    command = [sys.executable, "-P", "-m", "verl_slurm.loops.rendezvous", *program]

    def begin(local_rank: int) -> None:
        # A session of its own: signals that a rank sends to its process group do not reach us.
        process = subprocess.Popen(
            command, env=environs[local_rank], stdin=subprocess.DEVNULL, start_new_session=True
        )
        ranks[process.pid] = local_rank

    place = int(nodes), int(node_rank), int(here)
    environs = [rank_environment(whole, *place, local_rank) for local_rank in range(int(here))]
    ordered: dict[int, tuple[subprocess.Popen[bytes], str]] = {}
    try:
        for local_rank, environ in enumerate(environs):
            if (ready := waiting.get(local_rank)) is not None and (pipe := _order(ready, program, environ)):
                ranks[ready.pid], ordered[local_rank] = local_rank, (ready, pipe)
                continue
            begin(local_rank)
        for local_rank in _silent(ordered):
            # Stopped, or it hangs: the others would wait for it in their rendezvous.
            stuck = ordered[local_rank][0]
            del ranks[stuck.pid]
            _kill({stuck.pid: local_rank})
            _say(f"rank {place[1] * place[2] + local_rank} stood by and does not answer: it is made anew")
            begin(local_rank)
    except OSError as error:  # no memory, no processes
        # The ranks that were started would wait for this one in their rendezvous.
        _say(f"OSError: rank {int(node_rank) * int(here) + len(ranks)} was not started: {error}")
        _kill(ranks)
        return 1
    return _watch(ranks, int(node_rank) * int(here))


def _run_service(argv: list[str]) -> int:
    """Runs the program; returns its exit code, 128 + N if signal N ended it, 127 if it cannot be started."""
    become_subreaper()
    signal.signal(_HOST_GONE, _host_gone)
    die_with_parent(_HOST_GONE)
    # A host that died before `die_with_parent` sent no signal: another parent than the host means that it is gone.
    if os.getppid() == 1 or os.getppid() != int(os.environ.pop(HOST_PID_VARIABLE, "0")):
        return 1
    # Blocked in the service, and not only ignored: a web server installs a handler of its own for SIGTERM,
    # and would leave at the start of the save that may still need it.
    signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    try:
        service = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    except OSError as error:
        os.write(2, f"verl-slurm: {argv[0]}: {error.strerror}\n".encode())
        return 127
    while True:
        # Any of them: a subreaper must wait for what it adopts.
        pid, status = os.wait()
        if pid == service.pid:
            break
    kill_tree()
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _host_gone(_number: int, _frame: FrameType | None) -> None:
    kill_tree()
    os._exit(1)


def _order(ready: "subprocess.Popen[bytes]", program: list[str], environ: dict[str, str]) -> str:
    """Gives a process that stands by its orders; returns the pipe that it reads, or nothing if it is not there."""
    if ready.poll() is not None:  # an import failed, or somebody killed it
        return ""
    assert ready.stdin is not None
    try:
        pipe = f"pipe:[{os.fstat(ready.stdin.fileno()).st_ino}]"
        ready.stdin.write(Orders.of(program, environ).encode())
        ready.stdin.close()
    except OSError:
        ready.kill()
        ready.wait()
        return ""
    return pipe


def _silent(ordered: Mapping[int, tuple["subprocess.Popen[bytes]", str]]) -> list[int]:
    """Returns the local ranks of those that do not take their orders: one that does, closes the pipe."""
    worked = dict.fromkeys(ordered, (-1.0, 0.0))
    while True:
        now, waited = time.monotonic(), {}
        for local_rank, (before, since) in worked.items():
            if _reads(*ordered[local_rank]):
                used = _processor_s(ordered[local_rank][0].pid)
                waited[local_rank] = (before, since) if used == before else (used, now)
        worked = waited
        if all(now - since > _ANSWERS_S for _, since in worked.values()):
            return list(worked)
        time.sleep(0.01)  # a descriptor that is closed elsewhere is no event here


def _processor_s(pid: int) -> float:
    """Returns the processor time that a process has used; a process that is stopped, or waits, uses none."""
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return -1.0
    return float(used.user + used.system)


def _reads(process: "subprocess.Popen[bytes]", pipe: str) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/0") == pipe
    except OSError:  # it has ended, which `_watch` sees; or it keeps others from looking
        return False


def _watch(ranks: dict[int, int], first: int) -> int:
    """Waits until all ranks have ended. `ranks`: local rank by process id; `first`: a global rank."""
    kills_before = oom_kills()
    while ranks:
        pid, status = os.wait()
        local_rank = ranks.pop(pid, None)
        code = os.waitstatus_to_exitcode(status)
        if local_rank is None or code == 0:
            continue
        how = f"ended with exitcode {code}"
        if code < 0:
            how = f"was ended by Signal {-code} ({signal.Signals(-code).name})"
        kills = oom_kills()
        # Of a process below the rank, too: a data loader's worker, or the program of a script.
        if code == -signal.SIGKILL or (kills or 0) > (kills_before or 0):
            how += f": {_why_killed(kills_before, kills)}"
        _end(ranks)
        # After the others' end, so that it is the log's last line: where the agent looks.
        _say(f"rank {first + local_rank} (local rank {local_rank}, pid {pid}) {how}")
        return 1
    return 0


def _why_killed(before: int | None, now: int | None) -> str:
    """Returns the words for a rank that was killed: by the kernel's count of kills for lack of memory."""
    ways = "give it more memory (slurm.mem_mb_per_node), or let it need less (smaller batches, fewer ranks on a node)"
    if before is None or now is None:
        return f"most often that is lack of memory, and the kernel's count cannot be read here; {ways}"
    if now > before:
        return f"lack of memory, the kernel's count of such kills in its cgroup rose from {before} to {now}; {ways}"
    return (
        f"not by the kernel, which counts no kill for lack of memory in its cgroup ({now}): the program itself, a "
        f"person, or a guard of the node's memory has sent it; for a guard, {ways}"
    )


def _end(ranks: dict[int, int]) -> None:
    """Lets the other ranks end by themselves for `_GRACE_S`, then kills the rest."""
    until = time.monotonic() + _GRACE_S
    while ranks and time.monotonic() < until:
        # Whoever is waited for leaves `ranks`: its number may be another process's by the time of `_kill`.
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            ranks.pop(pid, None)
        else:
            time.sleep(0.01)  # no wait() with a time limit works without signals or threads
    _kill(ranks)


def _kill(ranks: dict[int, int]) -> None:
    for pid in ranks:
        with suppress(ProcessLookupError):
            # The group: a rank leads its own session, and data loaders and the like go with it.
            os.killpg(pid, signal.SIGKILL)
    for pid in ranks:
        with suppress(ChildProcessError):
            # Dead before this process ends, which the agent takes for the end of all ranks.
            os.waitpid(pid, 0)


def rank_environment(
    environ: Mapping[str, str], nodes: int, node_rank: int, here: int, local_rank: int
) -> dict[str, str]:
    """Returns the environment that torchrun gives a rank."""
    rank, world = node_rank * here + local_rank, nodes * here
    # Lightning, accelerate and transformers recognise a launcher by these names.
    ours = {
        "LOCAL_RANK": local_rank,
        "RANK": rank,
        "GROUP_RANK": node_rank,
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": here,
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": NOWHERE,
        "MASTER_PORT": 0,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": environ.get(RESTART_VARIABLE, "verl-slurm"),
        "TORCHELASTIC_USE_AGENT_STORE": True,  # torch's own handler would connect, and never listen
        "TORCH_GLOO_LAZY_INIT": 0,  # a group's connections are checked when it is built
    }
    # torchrun's defaults, which the user's environment may replace.
    unless_said = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if here > 1:
        unless_said["OMP_NUM_THREADS"] = "1"
    if nodes == 1:
        # One node needs no network: gloo then listens where no other node reaches it.
        unless_said["GLOO_SOCKET_IFNAME"] = "lo"
    return unless_said | dict(environ) | {name: str(value) for name, value in ours.items()}


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"verl-slurm: {text}\n".encode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
