"""The embedded cluster's configuration, as text. Pure: options in, slurm.conf out.

Run on Slurm 22.05.8, 24.11.5 and 26.05.5. Settings that are defaults in all of them (auth/munge, no accounting, no
task plugin) are left out: plugin names come and go between versions, defaults do not.

Slurm counts cores, memory and GPUs when it places jobs. It confines no job to them: that takes cgroups of its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

PREEMPTIBLE = "preemptible"
"""The default partition: `urgent` preempts its jobs. They are requeued after the grace time, unless asked otherwise.
"""
URGENT = "urgent"
"""A partition."""

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


class ClusterLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's facts: directory, user, ports, Slurm version."""

    directory: Path
    user: str
    name: str
    version: tuple[int, int]
    """E.g. (22, 5)."""
    memory_mb: int
    """Of each node."""
    by_loopback: bool = True
    """The daemons listen on the loopback alone. Slurm can do so where that is the address of the machine's name."""
    ports: tuple[int, ...]
    """slurmctld's, then one per node."""
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
    """Assigns GPUs to nodes, by their files. No two nodes share one. `real`: device files, e.g. /dev/nvidia0.

    `counted`: a directory for the names of GPUs that do not exist; CUDA_VISIBLE_DEVICES is not set for them.
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


def slurm_conf(options: ClusterOptions, layout: ClusterLayout, settings: Mapping[str, str]) -> str:
    """Returns the text of slurm.conf, with `settings` added or instead of ours; needs `options.nodes + 1` ports."""
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
        # By default Slurm listens on every interface, for what munge's key has signed.
        *["CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"] * layout.by_loopback,
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
        # By the partitions' PriorityTier below.
        "PreemptType=preempt/partition_prio",
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
    if options.plugstack is not None:
        lines.append(f"PlugStackConfig={options.plugstack}")
    if layout.gpus:
        lines.append("GresTypes=gpu")
    lines = [line for line in lines if line.partition("=")[0] not in settings]
    lines += [f"{name}={value}" for name, value in settings.items()]
    return "\n".join([*lines, *_nodes_and_partitions(options, layout)]) + "\n"


def _nodes_and_partitions(options: ClusterOptions, layout: ClusterLayout) -> list[str]:
    lines = []
    for name, port in zip(node_names(options.nodes), layout.ports[1:], strict=True):
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
    return lines


def cgroup_conf(version: tuple[int, int]) -> str:
    # Versions before 24.05 refuse `disabled`; their v1 plugin touches nothing until asked, and v2 would need systemd.
    # slurmd loads a cgroup plugin even if `proctrack/linuxproc` uses none of it.
    return f"CgroupPlugin={'disabled' if version >= (24, 5) else 'cgroup/v1'}\n"
