"""A real Slurm of several nodes on this machine, in one private directory, as root or any other user.

```
DIR/                 0700, default ~/.cache/verl-slurm/devcluster
  slurm.conf         (and cgroup.conf, gres.conf)
  state.json lock    what was started; one command at a time
  munge/             key, socket: our own, never the machine's
  state/ spool/ run/ slurmctld's state, each slurmd's spool, pid files
  gpus/              placeholder files of counted GPUs that do not exist
  log/               the daemons' logs
```

Everything listens on loopback alone.
"""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from verl_slurm.base.errors import ConfigError, SlurmRefused
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.processes import KnownProcess, boot_id, known
from verl_slurm.slurm.devcluster import conf, fixed_groups, machine
from verl_slurm.slurm.devcluster.cluster_processes import (
    Daemons,
    end_all,
    find_daemons,
    list_members,
    node_log_name,
)
from verl_slurm.slurm.devcluster.state import ClusterState, locked, read_state, write_state
from verl_slurm.slurm.runner import tell_user

# sockaddr_un.sun_path holds 108 bytes with the final NUL (unix(7)); the longest name we make below DIR is
# slurmstepd's spool/nodeNN/nodeNN_JOBID.STEPID
_MAX_DIRECTORY_BYTES = 108 - 1 - len("/spool/node16/node16_4294967295.4294967295")
_START_S = 30.0
_POLL_S = 0.05
_SUBDIRECTORIES = ("munge", "state", "spool", "run", "log", "gpus")


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `status`."""

    running: bool
    """slurmctld and munged of ours are alive."""
    directory: str
    slurm_conf: str
    slurm_version: str | None = None
    nodes: dict[str, str] = {}
    """Maps a node's name to Slurm's state (`idle`, `alloc`, `down*`, ...); `slurmd dead` if its process is gone."""
    gpus: dict[str, int] = {}
    """Maps a node's name to the number of GPUs that Slurm grants there."""
    gpus_are_real: bool = False
    """False: Slurm counts them, but they do not exist."""
    seconds: float = 0.0
    """Duration of the command."""
    left: list[int] = []
    """After a stop: pids that survived SIGKILL, because the kernel holds them in a system call. Usually empty."""


def default_directory() -> Path:
    """Returns `$XDG_CACHE_HOME/verl-slurm/devcluster`, mostly below ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "verl-slurm" / "devcluster"


class DevCluster:
    """One embedded cluster, named by its directory."""

    def __init__(self, directory: Path | str | None = None) -> None:
        chosen = default_directory() if directory is None else Path(directory)
        self.directory = Path(os.path.abspath(chosen))

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "slurm.conf"

    def env(self) -> dict[str, str]:
        """Returns the variables that a shell must export to talk to this cluster and to no other."""
        return {"SLURM_CONF": str(self.slurm_conf)}

    def client_env(self) -> dict[str, str]:
        """Returns this process's environment, pointed at this cluster, for Slurm's commands."""
        return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{machine.EXTRA_PATH}", **self.env()}

    def daemons(self) -> Daemons:
        return find_daemons(self.directory, self.slurm_conf)

    # ---- start

    def start(self, options: conf.ClusterOptions | None = None) -> ClusterStatus:
        """Starts the cluster and waits until every node is idle. A running cluster is left as it is.

        Raises:
            SlurmMissing: the programs are not installed.
            ConfigError: the directory's name is too long for a socket, or the user has no name.
            SlurmRefused: a daemon did not come up; the error quotes its log.
        """
        began = time.monotonic()
        options = options or conf.ClusterOptions()
        programs = machine.find_programs()
        user = machine.user_name()
        self._check_directory()
        private_dir(self.directory)
        # One command at a time: two starts would each end what the other has started.
        with locked(self.directory):
            if self.daemons().can_answer:
                return self.status()
            self._end_everything()
            try:
                self._start_daemons(options, programs, user)
            # Ctrl-C, too: half a cluster would look like one that runs.
            except BaseException:
                self._end_everything()
                raise
        status = self.status()
        return msgspec.structs.replace(status, seconds=round(time.monotonic() - began, 2))

    def _check_directory(self) -> None:
        length = len(os.fsencode(self.directory))
        if length > _MAX_DIRECTORY_BYTES:
            raise ConfigError(
                "the cluster's directory has too long a name for Unix sockets below it",
                where=self.directory,
                found=f"{length} bytes",
                expected=f"at most {_MAX_DIRECTORY_BYTES}",
                remedy="choose a shorter one with --dir",
            )
        if re.search(r"[^\w./+@:~-]", str(self.directory), re.ASCII):
            raise ConfigError(
                "the cluster's directory has a character that slurm.conf cannot hold",
                where=self.directory,
                remedy="choose a plain name with --dir",
            )

    def _start_daemons(self, options: conf.ClusterOptions, programs: dict[str, str], user: str) -> None:
        # One parameter of slurm.conf is spelled in two ways, and a version does not start with the other one's.
        version, version_text = machine.slurm_version(programs["slurmctld"])
        for name in _SUBDIRECTORIES:
            # state of an earlier start: its jobs are dead, and their numbers may come again
            shutil.rmtree(self.directory / name, ignore_errors=True)
            # 0700, because the sockets and munge's key below it open the cluster.
            (self.directory / name).mkdir(mode=0o700)
        for node in conf.node_names(options.nodes):
            (self.directory / "spool" / node).mkdir(mode=0o700)
        layout = conf.ClusterLayout(
            directory=self.directory,
            user=user,
            name=f"dev{secrets.token_hex(4)}",
            version=version,
            # Together the nodes have less than there is, as the system needs some itself.
            memory_mb=options.mem_mb_per_node
            or max(64, psutil.virtual_memory().total // 2**20 * 9 // 10 // options.nodes),
            by_loopback=machine.is_known_by_loopback(),
            ports=machine.free_ports(options.nodes + 1),
            gpus=conf.deal_gpus(options, machine.real_gpus(), self.directory / "gpus"),
        )
        if not layout.by_loopback:
            tell_user(
                "Slurm's daemons listen on every interface, to what this cluster's munge key signs: `127.0.0.1 "
                f"{socket.gethostname()}` as the first line of /etc/hosts has them on the loopback"
            )
        for file in (file for files in layout.gpus.values() for file in files):
            # Slurm grants GPUs that have a file; those that do not exist get an empty one.
            if not self._is_real(file):
                write_file(Path(file), b"")
        write_file(self.slurm_conf, conf.slurm_conf(options, layout, self.settings(layout)).encode())
        write_file(self.directory / "cgroup.conf", conf.cgroup_conf(version).encode())
        write_file(self.directory / "gres.conf", conf.gres_conf(layout).encode())
        # A key of its own: who may use the machine's munge cannot speak to this cluster, nor the other way round.
        write_file(self.directory / "munge" / "key", secrets.token_bytes(128))
        state = ClusterState(
            boot_id=boot_id(), name=layout.name, slurm_version=version_text, options=options, gpus=layout.gpus
        )
        write_state(self.directory, state)
        # In this order: slurmctld and slurmd sign each message by munge, and slurmd registers with slurmctld.
        self.start_munged()
        self.start_before_slurmctld(options, layout)
        self.start_slurmctld()
        for node in conf.node_names(options.nodes):
            self.start_slurmd(node)
        self._await_idle(options)

    def _daemon_env(self) -> dict[str, str]:
        return {
            "PATH": f"{os.environ.get('PATH', '')}:{machine.EXTRA_PATH}",
            # Small: jobs inherit parts of slurmd's, and a daemon needs no secrets.
            "LC_ALL": "C.UTF-8",
            **self.env(),
        }

    def settings(self, layout: conf.ClusterLayout) -> dict[str, str]:
        """Returns settings of slurm.conf that a cluster with further daemons has in addition, or instead of ours."""
        return {}

    def start_before_slurmctld(self, options: conf.ClusterOptions, layout: conf.ClusterLayout) -> None:
        """Starts daemons that slurmctld asks when it starts, in a cluster that has some."""

    def run_program(
        self,
        argv: list[str],
        log: Path,
        *,
        name: str | None = None,
        within_s: float | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Runs a program until it ends or has put itself into the background."""
        name = name or Path(argv[0]).name
        with open(self.directory / "log" / "start.log", "ab") as output:
            try:
                done = subprocess.run(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**self._daemon_env(), **(environment or {})},
                    cwd=self.directory,
                    timeout=within_s or _START_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise self._did_not_start(name, log) from None
        if done.returncode != 0:
            raise self._did_not_start(name, log)

    def spawn(
        self, argv: list[str], pid_file: Path, log: Path, environment: dict[str, str] | None = None
    ) -> None:
        """Starts a daemon that puts itself into the background, and waits for its pid file."""
        # The file of a former daemon would count as this one's.
        pid_file.unlink(missing_ok=True)
        name = Path(argv[0]).name
        self.run_program([*fixed_groups.prefix(), *argv], log, name=name, environment=environment)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            # the background process writes the pid file shortly after the foreground one has ended
            try:
                process = known(int(pid_file.read_text()))
            except (OSError, ValueError):
                process = None
            if process is not None:
                return
            time.sleep(_POLL_S)
        raise self._did_not_start(name, log)

    def _did_not_start(self, what: str, log: Path) -> SlurmRefused:
        lines: list[str] = []
        for path in (log, self.directory / "log" / "start.log"):
            if path.exists():
                lines += path.read_text(errors="replace").splitlines()[-50:]
        telling = [line for line in lines if re.search(r"fatal|error", line, re.IGNORECASE)] or lines
        return SlurmRefused(
            f"{what} did not start",
            where=log,
            found=" / ".join(telling[-3:]) or "an empty log",
            remedy="read that log; `verl-slurm devcluster stop` cleans up",
        )

    def start_munged(self) -> None:
        """Starts munged with the existing key. The caller holds the lock, as of the next two."""
        munge = self.directory / "munge"
        log = self.directory / "log" / "munged.log"
        argv = [
            machine.find_programs()["munged"],
            # munged wants its socket's directory open to all users; ours is for one user, so 0700 is right
            "--force",
            f"--key-file={munge / 'key'}",
            f"--socket={munge / 'socket'}",
            f"--pid-file={munge / 'pid'}",
            f"--seed-file={munge / 'seed'}",
            f"--log-file={log}",
            "--num-threads=2",
        ]
        self.spawn(argv, munge / "pid", log)

    def start_slurmctld(self) -> None:
        log = self.directory / "log" / "slurmctld.log"
        pid_file = self.directory / "run" / "slurmctld.pid"
        argv = [machine.find_programs()["slurmctld"], "-f", str(self.slurm_conf)]
        self.spawn(argv, pid_file, log)

    def start_slurmd(self, node: str) -> None:
        log = self.directory / "log" / node_log_name(node)
        pid_file = self.directory / "run" / f"slurmd.{node}.pid"
        argv = [machine.find_programs()["slurmd"], "-N", node, "-f", str(self.slurm_conf)]
        self.spawn(argv, pid_file, log)

    def _await_idle(self, options: conf.ClusterOptions) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            nodes = self.node_states()
            if len(nodes) == options.nodes and set(nodes.values()) == {"idle"}:
                return
            # A daemon that died has said why in its log; the rest of the time need not pass.
            daemons = self.daemons()
            if not daemons.can_answer:
                raise self._did_not_start("slurmctld", self.directory / "log" / "slurmctld.log")
            for node in conf.node_names(options.nodes):
                if node not in daemons.slurmd:
                    log = self.directory / "log" / node_log_name(node)
                    raise self._did_not_start(f"slurmd of {node}", log)
            # Slurm has no event for the registration of all nodes.
            time.sleep(_POLL_S)
        raise SlurmRefused(
            "the nodes did not become idle",
            where=self.directory / "log",
            found=self.node_states() or "no answer from slurmctld",
            remedy="read the logs there; `verl-slurm devcluster stop` cleans up",
        )

    # ---- status

    def node_states(self) -> dict[str, str]:
        """Maps a node's name to its state in `sinfo`; empty if slurmctld does not answer."""
        try:
            done = subprocess.run(
                # One partition: each node is in both, and -N would list it twice.
                [machine.find_programs()["sinfo"], "-h", "-N", "-p", "preemptible", "-o", "%N %t"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env={**self.client_env(), "LC_ALL": "C"},
                # Slurm's commands try for some 9 s where slurmctld is away (22.05.8).
                timeout=15,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {}
        return dict(line.split(None, 1) for line in done.stdout.splitlines() if " " in line)

    def status(self) -> ClusterStatus:
        began = time.monotonic()
        state = read_state(self.directory) if self.directory.is_dir() else None
        daemons = self.daemons()
        running = state is not None and daemons.can_answer
        nodes: dict[str, str] = {}
        if state is not None and running:
            nodes = self.node_states()
            for node in conf.node_names(state.options.nodes):
                # slurmctld notices that after `slurmd_timeout_s`, /proc shows it at once.
                if node not in daemons.slurmd:
                    nodes[node] = f"{nodes.get(node, 'unknown')} (slurmd dead)"
        return ClusterStatus(
            running=running,
            directory=str(self.directory),
            slurm_conf=str(self.slurm_conf),
            slurm_version=None if state is None else state.slurm_version,
            nodes=nodes,
            gpus={} if state is None else {name: len(files) for name, files in state.gpus.items()},
            gpus_are_real=state is not None
            and any(self._is_real(file) for file in sum(state.gpus.values(), ())),
            seconds=round(time.monotonic() - began, 2),
        )

    def _is_real(self, gpu: str) -> bool:
        return Path(gpu).parent != self.directory / "gpus"

    # ---- stop

    def stop(self) -> ClusterStatus:
        """Ends every process of the cluster, jobs included. Logs stay. Does nothing if nothing is running."""
        began = time.monotonic()
        left: list[KnownProcess] = []
        if self.directory.is_dir():
            with locked(self.directory):
                left = self._end_everything()
        return ClusterStatus(
            running=bool(left),
            directory=str(self.directory),
            slurm_conf=str(self.slurm_conf),
            seconds=round(time.monotonic() - began, 2),
            left=[process.pid for process in left],
        )

    def _end_everything(self) -> list[KnownProcess]:
        with _uninterrupted():
            return self._end_members()

    def _end_members(self) -> list[KnownProcess]:
        daemons = self.daemons()
        # In order: slurmctld first, so that it starts nothing new; then the nodes; then jobs, steps and munged. By
        # SIGKILL: the state is thrown away anyway, and a TERM would let slurmctld save it for seconds.
        end_all([] if daemons.slurmctld is None else [daemons.slurmctld])
        end_all(daemons.slurmd.values())
        left: list[KnownProcess] = []
        # a dying step may still fork: look again until nothing is found
        for _ in range(20):
            members = list_members(self.directory, self.slurm_conf)
            if not members:
                left = []
                break
            left = end_all(members)
        if not left:
            write_state(self.directory, None)
        return left


@contextmanager
def _uninterrupted() -> Iterator[None]:
    # A second Ctrl-C would leave half a cluster.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
