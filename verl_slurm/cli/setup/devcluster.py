"""`verl-slurm devcluster`: a real Slurm of several nodes on this machine, to try things on."""

import os
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.one_line import counted
from verl_slurm.cli.command_options import F, ParamType, Whole, flag, option, with_json
from verl_slurm.cli.show import render
from verl_slurm.config.explain import meanings
from verl_slurm.slurm.devcluster.cluster import ClusterStatus, DevCluster
from verl_slurm.slurm.devcluster.conf import ClusterOptions
from verl_slurm.slurm.devcluster.faults import fail_node, preempt, restore_node
from verl_slurm.slurm.devcluster.state import read_state
from verl_slurm.slurm.runner import telling
from verl_slurm.wire.environment import DEVCLUSTER_VARIABLE


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The whole first sentence of each: click cuts it off at 45 characters.
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(limit=1000)) for name, each in self.commands.items()]
            )


class _Gpus(ParamType[int | str]):
    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return "auto" if value == "auto" else Whole(min=0).convert(value, param, ctx)


def _chosen(ctx: click.Context, param: click.Parameter, value: Path | None) -> DevCluster:
    # The cluster that Slurm's own commands mean in this shell.
    conf = Path(os.environ.get("SLURM_CONF", ""))
    # A start makes a cluster, wherever the shell's last one was.
    if value is None and ctx.info_name != "start" and conf.name == "slurm.conf":
        with suppress(OSError):  # it may lie anywhere
            value = conf.parent if read_state(conf.parent) is not None else None
    return DevCluster(value)


_DIR = option(
    "--dir",
    click.Path(path_type=Path, readable=False, file_okay=False),
    "Where the cluster lives. [default: $VERL_SLURM_DEVCLUSTER, or the cluster that `devcluster env` has chosen "
    "in this shell, or ~/.cache/verl-slurm/devcluster]",
    "cluster",
    envvar=DEVCLUSTER_VARIABLE,
    callback=_chosen,
)


# Fields that are neither numbers nor switches.
_KINDS: dict[str, Any] = {
    "preempt_mode": click.Choice(get_args(get_type_hints(ClusterOptions)["preempt_mode"])),
    "gpus": _Gpus(),
    "plugstack": click.Path(exists=True, dir_okay=False, resolve_path=True),
}


def _options_of_a_cluster(command: F) -> F:
    """Adds an option for each field of `ClusterOptions`."""
    told = meanings(ClusterOptions)
    for field in reversed(msgspec.structs.fields(ClusterOptions)):
        name = re.sub("^send_|_per_node$|_s$", "", field.name).replace("_", "-")
        is_switch = isinstance(field.default, bool)
        command = click.option(
            f"--{name}/--no-{name}" if field.default is True else f"--{name}",
            field.name,
            is_flag=is_switch,
            type=None if is_switch else _KINDS.get(field.name, int),
            default=field.default,
            show_default=field.default is not None and field.default is not False,
            help=told[field.name],
        )(command)
    return command


@click.group(
    cls=_Group,
    epilog=(
        "Exit codes: 0 done, 10 an option is out of range, 13 Slurm's programs are missing, "
        "14 Slurm refused, 18 no such cluster, job or node."
    ),
)
def devcluster() -> None:
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

    Needs the Debian/Ubuntu packages slurm-wlm and munge (installed, not running). docs/devcluster.md has more.
    """


def _command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    return lambda function: with_json(devcluster.command(name)(_DIR(function)))


@_command("start")
@_options_of_a_cluster
def _start(cluster: DevCluster, as_json: bool, **chosen: Any) -> None:
    """Start the cluster and wait until all nodes are idle (a second or two).

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
    with telling(render.warning):
        status = cluster.start(options)
    head = f"Slurm {status.slurm_version} with {counted(len(status.nodes), 'node')} is up"
    facts = _gpus(status, asked=options.gpus)
    use = f"To use it in this shell:  {_exports(cluster.env())}"
    text = f"{head} after {status.seconds:.1f} s in {status.directory}\n{facts}{use}"
    render.answer(status, *text.splitlines(), as_json=as_json)


@_command("stop")
def _stop(cluster: DevCluster, as_json: bool) -> None:
    """End the cluster and everything that runs on it. Logs stay in its directory."""
    status = cluster.stop()
    text = f"stopped after {status.seconds:.1f} s; the logs are in {status.directory}/log"
    if status.left:
        text = f"these processes do not even die of SIGKILL: {status.left}"
    render.answer(status, *text.splitlines(), as_json=as_json)


@_command("status")
def _status(cluster: DevCluster, as_json: bool) -> None:
    """Whether it runs, and how Slurm sees its nodes."""
    status = cluster.status()
    lines = [f"{name}  {state}" for name, state in status.nodes.items()]
    head = f"Slurm {status.slurm_version} runs in" if status.running else "nothing runs in"
    facts = _gpus(status)
    text = "\n".join([f"{head} {status.directory}", *lines, facts])
    render.answer(status, *text.splitlines(), as_json=as_json)


@_command("preempt")
@click.argument("job", type=Whole(min=1))
@option("--hold", Whole(0, 3600), "Seconds that the urgent job keeps the nodes.", "hold_s", default=3)
def _preempt(job: int, cluster: DevCluster, hold_s: int, as_json: bool) -> None:
    """Have Slurm really preempt JOB, and return when Slurm says that it does.

    Submits a short job of higher priority that needs JOB's nodes. Slurm warns JOB, waits the grace time, ends
    and requeues it, unless it has saved and requeued itself by then.
    """
    done = preempt(cluster, job, hold_s=hold_s)
    # By the preemption mode: with a grace time Slurm sets PreemptTime; else the job is suspended, or queued again.
    if done.seen == "preempt_time":
        what = f"is being preempted; its grace time ends at {done.deadline}"
    elif done.seen == "suspended":
        what = "is suspended, and goes on when the urgent job has ended"
    else:
        what = "was preempted and is queued again"
    text = f"job {job} {what} (by job {done.urgent_job_id}, after {done.seconds:.1f} s)"
    render.answer(done, text, as_json=as_json)


@_command("fail-node")
@click.argument("node")
@flag("--restore", "Start NODE again after that, and wait until Slurm uses it.")
def _fail_node(node: str, cluster: DevCluster, restore: bool, as_json: bool) -> None:
    """Cut NODE's power: SIGKILL its slurmd and every process of every job on it, at once."""
    if restore:
        state = restore_node(cluster, node)
        render.answer({"node": node, "state": state}, f"{node} is {state}", as_json=as_json)
        return
    failure = fail_node(cluster, node)
    text = f"{node}: {counted(len(failure.killed), 'process')} killed; Slurm will notice by itself"
    render.answer(failure, text, as_json=as_json)


@_command("env")
def _env(cluster: DevCluster, as_json: bool) -> None:
    """Print what a shell must export to use the cluster: eval "$(verl-slurm devcluster env)"."""
    env = cluster.env()
    render.answer(env, *_exports(env).splitlines(), as_json=as_json)


def _gpus(status: ClusterStatus, *, asked: int | str = 0) -> str:
    if not status.gpus:
        return "no GPU is granted: this machine has none\n" if asked == "auto" else ""
    each = ", ".join(f"{number} on {node}" for node, number in status.gpus.items())
    kind = "GPUs of this machine" if status.gpus_are_real else "GPUs that are counted and not there"
    return f"{kind}: {each}\n"


def _exports(env: dict[str, str]) -> str:
    # Quoted, since a shell evaluates it.
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())
