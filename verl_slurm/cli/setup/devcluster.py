"""`verl-slurm devcluster`: a real Slurm of several nodes on this machine, to try things on."""

import shlex
from pathlib import Path
from typing import Any

import click
import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.one_line import counted
from verl_slurm.cli.options import ParamType, Whole
from verl_slurm.cli.show import render
from verl_slurm.devcluster.cluster import ClusterStatus, DevCluster
from verl_slurm.devcluster.conf import ClusterOptions
from verl_slurm.devcluster.faults import fail_node, preempt, restore_node
from verl_slurm.wire.environment import DEVCLUSTER_VARIABLE

__all__ = ["command"]


class _Group(click.Group):
    """Lists its commands in the order of use, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the whole first sentence of each: click cuts it off at 45 characters."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(limit=1000)) for name, each in self.commands.items()]
            )


class _Gpus(ParamType[int | str]):
    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return "auto" if value == "auto" else Whole(min=0).convert(value, param, ctx)


_GPUS = _Gpus()
_DIR = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, readable=False, file_okay=False),
    envvar=DEVCLUSTER_VARIABLE,
    help="Where the cluster lives. [default: ~/.cache/verl-slurm/devcluster, or $VERL_SLURM_DEVCLUSTER]",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def _say(as_json: bool, value: msgspec.Struct | dict[str, Any], text: str) -> None:
    if as_json:
        render.json_value(value)
    else:
        # Line by line, as `render.line` keeps what it is given on one.
        for line in text.splitlines():
            render.line(line)


@click.group(
    "devcluster",
    cls=_Group,
    epilog=(
        "Exit codes: 0 done, 10 an option is out of range, 13 Slurm's programs are missing, "
        "14 Slurm refused, 18 no such cluster, job or node."
    ),
)
def command() -> None:
    """A real Slurm cluster of several nodes on this machine, in one private directory.

    Real munged, slurmctld and one slurmd a node, as root or as anyone, in a container or not, beside any
    cluster that is there already. Jobs go to the partition `preemptible`; those in `urgent` preempt them, as on
    a big cluster. It takes no systemd, no cgroups and no privileges.

    \b
    verl-slurm devcluster start
    eval "$(verl-slurm devcluster env)"       # squeue, sbatch, ... now mean this cluster
    verl-slurm submit quickstart
    verl-slurm devcluster preempt JOB         # JOB: the number that submit printed
    verl-slurm devcluster stop                # ends everything on it, jobs too

    Other clusters to try things on:

    \b
    verl-slurm devcluster start --gpus 2                   # jobs that ask for GPUs start; there need be none
    verl-slurm devcluster start --cpus 8 --mem-mb 16000    # jobs share nodes, as far as both suffice
    verl-slurm devcluster start --accounting               # sacct, priorities, and a QOS that preempts another
    sbatch --qos=urgent --nodes=4 --exclusive --wrap "sleep 10"

    Needs the Debian/Ubuntu packages slurm-wlm and munge (installed, not running), and --accounting also
    slurmdbd and mariadb-server-core. docs/devcluster.md has more.
    """


@command.command("start")
@_DIR
@click.option("--nodes", type=int, default=4, show_default=True, help="How many nodes.")
@click.option(
    "--cpus",
    "cpus_per_node",
    type=int,
    default=2,
    show_default=True,
    help="CPUs of each node. Slurm counts them; the machine need not have them.",
)
@click.option(
    "--mem-mb",
    "mem_mb_per_node",
    type=int,
    default=None,
    help="Memory of each node in MB, counted like --cpus. [default: all nodes share nine tenths of the machine's]",
)
@click.option(
    "--grace",
    "grace_s",
    type=int,
    default=30,
    show_default=True,
    help="Seconds from a preemption's warning to the end of the job; 0: no warning.",
)
@click.option(
    "--preempt-mode",
    type=click.Choice(["REQUEUE", "CANCEL", "SUSPEND"]),
    default="REQUEUE",
    show_default=True,
    help="What becomes of a job that is preempted.",
)
@click.option(
    "--kill-wait",
    "kill_wait_s",
    type=int,
    default=15,
    show_default=True,
    help="Seconds from TERM to KILL.",
)
@click.option(
    "--slurmd-timeout",
    "slurmd_timeout_s",
    type=int,
    default=10,
    show_default=True,
    help="Seconds until a silent node counts as lost.",
)
@click.option(
    "--cred-expire",
    "cred_expire_s",
    type=int,
    default=None,
    help="Life of a credential in seconds; a plain requeue waits that long. [default: Slurm's own, 120]",
)
@click.option(
    "--gpus",
    type=_GPUS,
    default="0",
    show_default=True,
    help="GPUs of each node. auto: this machine's, dealt out to the nodes in turn. A number that this machine does not "
    "have for every node: counted only, so that jobs which ask for GPUs start; they find none.",
)
@click.option(
    "--plugstack",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    default=None,
    help="A file of plugins for srun and slurmd, as Slurm's plugstack.conf; e.g. Pyxis.",
)
@click.option(
    "--user-signal/--no-user-signal",
    "send_user_signal",
    default=True,
    show_default=True,
    help="Warn the batch process at a preemption (`sbatch --signal=B:..`); without, steps get TERM at once.",
)
@click.option(
    "--accounting",
    is_flag=True,
    help="With slurmdbd and MariaDB: `sacct` answers, jobs have priorities, and jobs of the QOS `urgent` preempt those "
    "of `normal`. Needs the packages slurmdbd and mariadb-server-core, too.",
)
@_JSON
def _start(directory: Path | None, as_json: bool, **chosen: Any) -> None:
    """Start the cluster and wait until all nodes are idle (a second or two; some 15 s with --accounting).

    Does nothing if it runs already, whatever the options: stop it first to change them.
    """
    try:
        # The ranges stand in the struct, so that a caller from Python is held to the same ones.
        options = msgspec.convert(chosen, ClusterOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(
            "an option of the cluster is out of range",
            found=error,
            remedy="verl-slurm devcluster start --help",
        ) from error
    cluster = DevCluster(directory)
    status = cluster.start(options)
    head = f"Slurm {status.slurm_version} with {counted(len(status.nodes), 'node')} is up"
    facts = _gpus(status, asked=options.gpus) + _accounting(status)
    _say(
        as_json,
        status,
        f"{head} after {status.seconds:.1f} s in {status.directory}\n{facts}"
        f"To use it in this shell:  {_exports(cluster.env())}",
    )


@command.command("stop")
@_DIR
@_JSON
def _stop(directory: Path | None, as_json: bool) -> None:
    """End the cluster and everything that runs on it. Logs stay in its directory."""
    status = DevCluster(directory).stop()
    text = f"stopped after {status.seconds:.1f} s; the logs are in {status.directory}/log"
    if status.left:
        text = f"these processes do not even die of SIGKILL: {status.left}"
    _say(as_json, status, text)


@command.command("status")
@_DIR
@_JSON
def _status(directory: Path | None, as_json: bool) -> None:
    """Whether it runs, and how Slurm sees its nodes."""
    status = DevCluster(directory).status()
    lines = [f"{name}  {state}" for name, state in status.nodes.items()]
    head = f"Slurm {status.slurm_version} runs in" if status.running else "nothing runs in"
    facts = _gpus(status) + _accounting(status)
    _say(as_json, status, "\n".join([f"{head} {status.directory}", *lines, facts]))


@command.command("preempt")
@click.argument("job", type=Whole(min=1))
@_DIR
@click.option(
    "--hold",
    "hold_s",
    type=Whole(0, 3600),
    default=3,
    show_default=True,
    help="Seconds that the urgent job keeps the nodes.",
)
@_JSON
def _preempt(job: int, directory: Path | None, hold_s: int, as_json: bool) -> None:
    """Have Slurm really preempt JOB, and return when Slurm says that it does.

    Submits a short job of higher priority that needs JOB's nodes. Slurm warns JOB, waits the grace time, ends
    and requeues it, unless it has saved and requeued itself by then.
    """
    done = preempt(DevCluster(directory), job, hold_s=hold_s)
    # By the preemption mode: with a grace time Slurm sets PreemptTime; else the job is suspended, or queued again.
    if done.seen == "preempt_time":
        what = f"is being preempted; its grace time ends at {done.deadline}"
    elif done.seen == "suspended":
        what = "is suspended, and goes on when the urgent job has ended"
    else:
        what = "was preempted and is queued again"
    _say(as_json, done, f"job {job} {what} (by job {done.urgent_job_id}, after {done.seconds:.1f} s)")


@command.command("fail-node")
@click.argument("node")
@_DIR
@_JSON
def _fail_node(node: str, directory: Path | None, as_json: bool) -> None:
    """Cut NODE's power: SIGKILL its slurmd and every process of every job on it, at once."""
    failure = fail_node(DevCluster(directory), node)
    _say(
        as_json,
        failure,
        f"{node}: {counted(len(failure.killed), 'process')} killed; Slurm will notice by itself",
    )


@command.command("restore-node")
@click.argument("node")
@_DIR
@_JSON
def _restore_node(node: str, directory: Path | None, as_json: bool) -> None:
    """Start NODE again after fail-node, and wait until Slurm uses it."""
    state = restore_node(DevCluster(directory), node)
    _say(as_json, {"node": node, "state": state}, f"{node} is {state}")


@command.command("env")
@_DIR
@_JSON
def _env(directory: Path | None, as_json: bool) -> None:
    """Print what a shell must export to use the cluster: eval "$(verl-slurm devcluster env)"."""
    env = DevCluster(directory).env()
    _say(as_json, env, _exports(env))


def _gpus(status: ClusterStatus, *, asked: int | str = 0) -> str:
    """Returns a line about the GPUs, or nothing without any."""
    if not status.gpus:
        return "no GPU is granted: this machine has none\n" if asked == "auto" else ""
    each = ", ".join(f"{number} on {node}" for node, number in status.gpus.items())
    kind = "GPUs of this machine" if status.gpus_are_real else "GPUs that are counted and not there"
    return f"{kind}: {each}\n"


def _accounting(status: ClusterStatus) -> str:
    return "accounting: jobs of the QOS urgent preempt those of normal\n" if status.accounting else ""


def _exports(env: dict[str, str]) -> str:
    # Quoted, since a shell evaluates it.
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())
