"""The embedded cluster's configuration, as text. Pure: options in, slurm.conf out.

Differences between Slurm versions (run on 22.05.8, 24.11.5 and 26.05.5):

* up to 22.05 the early warning at a preemption is `SlurmctldParameters=preempt_send_user_signal`, from
  23.02 it is `PreemptParameters=send_user_signal`; the other spelling is a fatal parse error.
* slurmd loads a cgroup plugin even if `proctrack/linuxproc` uses none of it. The v2 plugin needs systemd or a
  cgroup of its own, and most containers have neither. From 24.05 `CgroupPlugin=disabled` loads none. Older versions
  refuse that word; their v1 plugin touches nothing until something asks it to.

Settings that are defaults in all of them (auth/munge, no accounting, no task plugin) are left out: plugin names come
and go between versions, defaults do not.

Slurm counts cores, memory and GPUs when it places jobs. It confines no job to them: that takes cgroups of its own.

With accounting, MariaDB listens on a socket in the cluster's directory and on no port. slurmdbd has a password for it,
made at each start, which is in slurmdbd.conf and, until the database has read it, in a file of SQL; both have mode
0600. Slurm's programs prove to slurmdbd who they are by munge. With the cluster's state the database is lost at the
next start. In it are the cluster, the account `dev`, this user (and root), and two QOS. `normal` is Slurm's own and the
default; `urgent` preempts it. Jobs of `normal` get the cluster's grace time and preemption mode.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

PREEMPTIBLE = "preemptible"
"""The default partition: `urgent` preempts its jobs. They are requeued after the grace time, unless asked otherwise.
"""
URGENT = "urgent"
"""A partition. With accounting a QOS, too."""

_NodeCount = Annotated[int, msgspec.Meta(ge=1, le=16)]
_CpuCount = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_MegaBytes = Annotated[int, msgspec.Meta(ge=64, le=2**24)]
_GpuCount = Annotated[int, msgspec.Meta(ge=0, le=16)]
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=3600)]


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options for a user or a test; `verl-slurm devcluster start` has them, with these texts as its help."""

    nodes: _NodeCount = 4
    """How many nodes."""
    cpus_per_node: _CpuCount = 2
    """CPUs of each node. Slurm counts them; the machine need not have them."""
    mem_mb_per_node: _MegaBytes | None = None
    """Memory of each node in MB, counted like the CPUs. [default: all nodes share nine tenths of the machine's]"""
    grace_s: _Seconds = 30
    """Seconds from a preemption's warning to the end of the job; 0: no warning."""
    preempt_mode: Literal["REQUEUE", "CANCEL", "SUSPEND"] = "REQUEUE"
    """What becomes of a job that is preempted. SUSPEND has no grace time."""
    kill_wait_s: _Seconds = 15
    """Seconds from TERM to KILL."""
    slurmd_timeout_s: Annotated[int, msgspec.Meta(ge=5, le=3600)] = 10
    """Seconds until a silent node counts as lost (Slurm looks at least every third of it)."""
    cred_expire_s: Annotated[int, msgspec.Meta(ge=5, le=3600)] | None = None
    """Life of a credential in seconds; a plain requeue waits that long. [default: Slurm's own, 120]"""
    gpus: _GpuCount | Literal["auto"] = 0
    """GPUs of each node. auto: this machine's, dealt out to the nodes in turn. A number that this machine does not
    have for every node: counted only, so that jobs which ask for GPUs start; they find none."""
    plugstack: str | None = None
    """A file of plugins for srun and slurmd, as Slurm's plugstack.conf; e.g. Pyxis."""
    send_user_signal: bool = True
    """Warn the batch process at a preemption (`sbatch --signal=B:..`); without, steps get TERM at once."""
    accounting: bool = False
    """With slurmdbd and MariaDB: `sacct` answers, jobs have priorities, and jobs of the QOS `urgent` preempt those of
    `normal`, in any partition. Needs the packages slurmdbd and mariadb-server-core, too."""


class ClusterLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's facts: directory, user, ports, Slurm version."""

    directory: Path
    user: str
    name: str
    version: tuple[int, int]
    """E.g. (22, 5)."""
    memory_mb: int
    """Of each node."""
    ports: tuple[int, ...]
    """slurmctld's, then one per node, then slurmdbd's."""
    gpus: dict[str, tuple[str, ...]] = {}
    """Maps a node's name to the files of its GPUs."""

    @property
    def munge_socket(self) -> Path:
        return self.directory / "munge" / "socket"

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "slurm.conf"


def node_names(count: int) -> list[str]:
    return [f"node{number}" for number in range(1, count + 1)]


def deal_gpus(options: ClusterOptions, real: Sequence[str], counted: Path) -> dict[str, tuple[str, ...]]:
    """Assigns GPUs to nodes, by their files. No two nodes share one.

    Args:
        options: the number of nodes and `gpus` are used.
        real: the device files of the machine's GPUs, e.g. /dev/nvidia0.
        counted: a directory. Slurm wants a file for each GPU that it grants. GPUs that do not exist have one here,
            which is nothing but a name: CUDA_VISIBLE_DEVICES is not set for them.
    """
    names = node_names(options.nodes)
    if options.gpus == "auto":
        each = {name: tuple(real[number :: options.nodes]) for number, name in enumerate(names)}
    elif options.gpus * options.nodes <= len(real):
        each = {
            name: tuple(real[number :: options.nodes][: options.gpus]) for number, name in enumerate(names)
        }
    else:
        # Not enough real ones for all: then none, so that all nodes are alike.
        each = {name: tuple(f"{counted}/{name}-gpu{n}" for n in range(options.gpus)) for name in names}
    return {name: files for name, files in each.items() if files}


def gres_conf(layout: ClusterLayout) -> str:
    """Returns the text of gres.conf; empty without GPUs."""
    lines = [
        f"NodeName={name} Name=gpu File={file}\n" for name, files in layout.gpus.items() for file in files
    ]
    return "".join(lines)


def slurm_conf(options: ClusterOptions, layout: ClusterLayout) -> str:
    """Returns the text of slurm.conf. The layout must have `options.nodes + 2` ports."""
    base = layout.directory
    auth = f"socket={layout.munge_socket}"
    if options.cred_expire_s is not None:
        auth += f",cred_expire={options.cred_expire_s}"
    slurmctld_parameters = []
    preempt_parameters = []
    if options.send_user_signal:
        # The other version's spelling is a fatal parse error.
        if layout.version >= (23, 2):
            preempt_parameters.append("send_user_signal")
        else:
            slurmctld_parameters.append("preempt_send_user_signal")
    lines = [
        "# Written by `verl-slurm devcluster start`; lost at the next start.",
        f"ClusterName={layout.name}",
        "SlurmctldHost=localhost",
        f"SlurmUser={layout.user}",
        f"SlurmdUser={layout.user}",
        f"AuthInfo={auth}",
        f"SlurmctldPort={layout.ports[0]}",
        f"SlurmctldPidFile={base}/run/slurmctld.pid",
        f"SlurmdPidFile={base}/run/slurmd.%n.pid",
        f"SlurmdSpoolDir={base}/spool/%n",
        f"StateSaveLocation={base}/state",
        f"SlurmctldLogFile={base}/log/slurmctld.log",
        f"SlurmdLogFile={base}/log/slurmd.%n.log",
        # loopback alone: by default Slurm listens on every interface
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        # No cgroups of its own: most containers grant none.
        "ProctrackType=proctrack/linuxproc",
        "SelectType=select/cons_tres",
        # A suspended job keeps its memory: the job that preempts it would have none left.
        f"SelectTypeParameters={'CR_Core' if options.preempt_mode == 'SUSPEND' else 'CR_Core_Memory'}",
        # Without it a job that asks for no memory gets the whole node's.
        f"DefMemPerCPU={max(1, layout.memory_mb // options.cpus_per_node)}",
        # a machine with fewer cores than the nodes claim is as good: nothing is bound
        "SlurmdParameters=config_overrides",
        # A node whose slurmd was killed comes back by itself when that runs again.
        "ReturnToService=2",
        "JobRequeue=1",
        # By the partitions' PriorityTier below, unless there is an accounting database, which a QOS needs.
        f"PreemptType=preempt/{'qos' if options.accounting else 'partition_prio'}",
        # the gang scheduler resumes suspended jobs: Slurm accepts SUSPEND in combination with GANG
        f"PreemptMode={'SUSPEND,GANG' if options.preempt_mode == 'SUSPEND' else options.preempt_mode}",
        "SchedulerType=sched/backfill",
        # Slurm's defaults look for work every 30 and 60 s: each preemption would wait for that.
        "SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0",
        f"KillWait={options.kill_wait_s}",
        f"SlurmdTimeout={options.slurmd_timeout_s}",
        # finished jobs stay visible to `scontrol show job` for an hour
        "MinJobAge=3600",
    ]
    if slurmctld_parameters:
        lines.append(f"SlurmctldParameters={','.join(slurmctld_parameters)}")
    if preempt_parameters:
        lines.append(f"PreemptParameters={','.join(preempt_parameters)}")
    if options.accounting:
        lines += _accounting(layout)
    if options.plugstack is not None:
        lines.append(f"PlugStackConfig={options.plugstack}")
    if layout.gpus:
        lines.append("GresTypes=gpu")
    for name, port in zip(node_names(options.nodes), layout.ports[1:-1], strict=True):
        gpus = f" Gres=gpu:{len(layout.gpus[name])}" if name in layout.gpus else ""
        lines.append(
            # One machine for all: nodes differ by name (`slurmd -N`) and port.
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={options.cpus_per_node} RealMemory={layout.memory_mb}{gpus} State=UNKNOWN"
        )
    lines.append(
        f"PartitionName={PREEMPTIBLE} Nodes=ALL Default=YES PriorityTier=1 "
        f"PreemptMode={options.preempt_mode} GraceTime={options.grace_s} "
        "DefaultTime=60 MaxTime=1440 State=UP"
    )
    lines.append(
        f"PartitionName={URGENT} Nodes=ALL PriorityTier=10 PreemptMode=OFF "
        "DefaultTime=10 MaxTime=1440 State=UP"
    )
    return "\n".join(lines) + "\n"


def _accounting(layout: ClusterLayout) -> list[str]:
    lines = [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=localhost",
        f"AccountingStoragePort={layout.ports[-1]}",
        # No password: with munge the word is the socket. For messages to slurmdbd AuthInfo above does not count.
        f"AccountingStoragePass={layout.munge_socket}",
        # As on big clusters: without it Slurm takes any --qos and any account, and limits do not hold.
        "AccountingStorageEnforce=associations,limits,qos",
        # By /proc; the cgroup plugin would need cgroups of its own. For MaxRSS and the like in sacct.
        "JobAcctGatherType=jobacct_gather/linux",
        "PriorityType=priority/multifactor",
        "PriorityWeightQOS=10000",
        "PriorityWeightAge=1000",
        "PriorityWeightFairshare=1000",
    ]
    if layout.gpus:
        lines.append("AccountingStorageTRES=gres/gpu")
    return lines


def cgroup_conf(version: tuple[int, int]) -> str:
    # Versions before 24.05 refuse `disabled`; their v1 plugin touches nothing until asked, and v2 would need systemd.
    return f"CgroupPlugin={'disabled' if version >= (24, 5) else 'cgroup/v1'}\n"


_ACCOUNT = "dev"
_DATABASE = "slurm_acct_db"
_DATABASE_USER = "slurm"


def mariadbd_socket(directory: Path) -> Path:
    """Returns the database's socket. libmariadb finds it by MYSQL_UNIX_PORT; slurmdbd.conf has no key for it."""
    return directory / "database" / "socket"


def slurmdbd_conf(layout: ClusterLayout, password: str) -> str:
    """Returns the text of slurmdbd.conf. slurmdbd wants it with mode 0600."""
    base = layout.directory
    lines = [
        "# Written by `verl-slurm devcluster start`; lost at the next start.",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        "DbdHost=localhost",
        f"DbdPort={layout.ports[-1]}",
        # loopback alone
        "CommunicationParameters=NoInAddrAny",
        f"SlurmUser={layout.user}",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        f"StorageUser={_DATABASE_USER}",
        f"StoragePass={password}",
        f"StorageLoc={_DATABASE}",
        f"LogFile={base}/log/slurmdbd.log",
        f"PidFile={base}/run/slurmdbd.pid",
    ]
    return "\n".join(lines) + "\n"


def install_database(program: str, layout: ClusterLayout) -> list[str]:
    """Returns the command line that makes an empty database. Its own root is this user, by the socket alone."""
    return [
        program,
        # Not the machine's own configuration, which has other directories.
        "--no-defaults",
        f"--datadir={layout.directory / 'database' / 'data'}",
        "--auth-root-authentication-method=socket",
        f"--auth-root-socket-user={layout.user}",
        "--skip-test-db",
    ]


def database_sql(password: str) -> str:
    """Returns the SQL that gives slurmdbd its database. `password` must need no quoting."""
    return (
        f"CREATE DATABASE {_DATABASE};\n"
        f"CREATE USER {_DATABASE_USER}@localhost IDENTIFIED BY '{password}';\n"
        f"GRANT ALL ON {_DATABASE}.* TO {_DATABASE_USER}@localhost;\n"
    )


def mariadbd_argv(program: str, layout: ClusterLayout, sql: Path) -> list[str]:
    """Returns the command line of the database's server, which stays in the foreground."""
    base = layout.directory
    return [
        program,
        "--no-defaults",
        # As root it starts only if it is told so; else this changes nothing.
        f"--user={layout.user}",
        f"--datadir={base / 'database' / 'data'}",
        f"--socket={mariadbd_socket(base)}",
        "--skip-networking",
        f"--pid-file={base / 'run' / 'mariadbd.pid'}",
        f"--log-error={base / 'log' / 'mariadbd.log'}",
        f"--init-file={sql}",
        # Not durable: nothing of it outlives the cluster.
        "--innodb-flush-log-at-trx-commit=0",
        "--performance-schema=OFF",
        # With less of these three slurmdbd logs an error.
        "--innodb-buffer-pool-size=128M",
        "--innodb-log-file-size=64M",
        "--innodb-lock-wait-timeout=900",
    ]


def sacctmgr_commands(program: str, options: ClusterOptions, layout: ClusterLayout) -> list[list[str]]:
    # In the spelling of `sacctmgr`. GANG belongs to the cluster's mode alone.
    mode = options.preempt_mode.lower()
    allowed = [f"DefaultAccount={_ACCOUNT}", f"QOS=normal,{URGENT}", "DefaultQOS=normal"]
    words = [
        ["add", "cluster", layout.name],
        ["modify", "qos", "normal", "set", f"GraceTime={options.grace_s}", f"PreemptMode={mode}"],
        ["add", "qos", URGENT, "Priority=1000", "Preempt=normal"],
        ["add", "account", _ACCOUNT],
        *(["add", "user", user, *allowed] for user in dict.fromkeys((layout.user, "root"))),
    ]
    return [[program, "--immediate", *each] for each in words]
