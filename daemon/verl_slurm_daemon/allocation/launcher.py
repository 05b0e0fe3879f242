"""Builds the command lines of a restart as values: srun for the agents, `ranks` or Ray for the ranks. Pure."""

import hashlib
from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from verl_slurm.base.paths import RunPaths
from verl_slurm.base.search_path import clean_environment
from verl_slurm.config.schema import RunConfig, nodes_of_services
from verl_slurm.containers.runtimes import agents_inside, contained_argv, ranks_inside
from verl_slurm.wire import environment
from verl_slurm.wire.hang_records import flight_environment
from verl_slurm.wire.messages import Launch
from verl_slurm_daemon.allocation.contract import StepPlacement, TooFewNodes


def daemon_argv(python: str, command: str, paths: RunPaths, attempt: int, *more: str) -> list[str]:
    """Returns the command line of a process of this attempt: an `agent`, a host of a `service`, or a `bring-home`."""
    # -P: Python does not search the directory in which the user submitted. A module planted there would be imported in
    # place of ours.
    life = ["--run", str(paths.root), "--attempt", str(attempt)]
    return [python, "-P", "-m", "verl_slurm_daemon", command, *life, *more]


class StepNodes(NamedTuple):
    """The nodes of a step, among all of the job's."""

    wanted: range
    """Counted over all components, in their order."""
    groups: tuple[int, ...]
    """The components that they are in."""
    are_whole: bool
    """They are all nodes of these components: srun needs no list of them."""


def nodes_of_step(config: RunConfig, sizes: Sequence[int], service: str = "") -> StepNodes:
    """Returns which nodes a step has. `sizes`: nodes of each component; `service`: empty for the ranks."""
    ranks = config.distributed.nodes
    wanted = nodes_of_services(ranks, config.services)[service] if service else range(ranks)
    # What a job is asked for by hand may be larger than the run: then srun chooses among its nodes, as ever.
    if config.all_nodes == ranks and not service:
        return StepNodes(wanted, tuple(range(len(sizes))), True)
    ends = list(accumulate(sizes))
    spans = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    groups = [
        number for number, span in enumerate(spans) if span.start < wanted.stop and wanted.start < span.stop
    ]
    return StepNodes(wanted, tuple(groups), sum(sizes[number] for number in groups) == len(wanted))


def choose_places(
    names: Sequence[str], avoid: Collection[str], allowed: Sequence[int], *, with_spares: bool
) -> StepPlacement:
    """Returns which of a job's nodes, `names` in Slurm's order, the ranks get: the largest number in `allowed` that
    they can have. `avoid`, `with_spares` and the error are those of `Allocation.places`.
    """
    if len(names) < allowed[-1]:
        raise TooFewNodes(
            f"the job has {len(names)} nodes left, {', '.join(names)}; its ranks need {allowed[-1]}"
        )
    kept = [name for name in names if name not in avoid]
    ranks = next((number for number in allowed if number <= len(kept)), allowed[-1])
    # A node that is only supposed to be lost is better than none.
    back = [name for name in names if name in avoid]
    chosen = kept if with_spares and len(kept) > ranks else (kept + back)[:ranks]
    return StepPlacement(
        tuple(name for name in names if name in chosen),
        () if with_spares else tuple(name for name in kept if name not in chosen),
    )


def step_argv(
    srun: str,
    config: RunConfig,
    agent: list[str],
    *,
    het_size: int = 1,
    nodes: StepNodes | None = None,
    names: Sequence[str] = (),
    cpus: int = 0,
) -> list[str]:
    """Returns the command line of a Slurm step with an agent, or a service's host, on each of its nodes.

    Args:
        het_size: components of the job. Above 1, each component brings its own number of nodes.
        nodes: of the step; None: all nodes of the job.
        names: Slurm's names of the nodes, where they are a part of a component, or chosen among spare ones.
        cpus: of each node; 0: those of the ranks' nodes.
    """
    number = len(names) or (config.distributed.nodes if nodes is None else len(nodes.wanted))
    counts = [f"--nodes={number}", f"--ntasks={number}"]
    if het_size > 1:
        groups = range(het_size) if nodes is None else nodes.groups
        # srun counts the tasks of each component by itself; SLURM_NODEID counts over all of them (seen on 22.05.8).
        counts = [*(counts if names else ()), "--het-group=" + ",".join(map(str, groups))]
    if names:
        counts.append("--nodelist=" + ",".join(names))
    argv = [
        srun,
        *counts,
        "--ntasks-per-node=1",
        # Repeated: since 22.05 srun does not take it from the job.
        f"--cpus-per-task={cpus or config.slurm.cpus_per_node}",
        "--overlap",  # saved parts may have to be fetched while the ranks' step runs
        # The end of one agent says nothing about the others; the lead decides.
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",
        "--cpu-bind=none",
        "--input=none",
        "--quiet",
        # The step goes on when Slurm takes a lost node from the job: another has its place, or none is needed.
        *(["--no-kill"] if config.may_lose_nodes else []),
    ]
    return [*argv, *(contained_argv(config, agent[3:]) if agents_inside(config) else agent)]


def launcher_argv(
    python: str, config: RunConfig, paths: RunPaths, launch: Launch, scratch: Path
) -> list[str]:
    """Returns the command that starts one node's ranks: `ranks`, or Ray for verl's PPO and programs on Ray."""
    life = ["--run", str(paths.root), "--attempt", str(launch.attempt), "--resume", launch.resume]
    trainer, shape = config.trainer, config.distributed
    if trainer.on_ray:
        here = ["--node-rank", str(launch.node_rank), "--head", f"{launch.master_addr}:{launch.master_port}"]
        here += ["--nodes", str(launch.nodes or shape.nodes), "--scratch", str(scratch)]
        return [python, "-P", "-m", "verl_slurm.loops.verl.ray_node", *life, *here]
    if trainer.backend == "verl":
        # verl's SFT is one process for each rank, as torchrun would start it, and needs no Ray.
        program = ["-m", "verl_slurm.loops.verl.verl_sft", *life]
    elif trainer.backend == "command":
        program = list(trainer.command)
    else:
        program = ["-m", "verl_slurm.trainer", *life]
    place = [str(launch.nodes or shape.nodes), str(launch.node_rank), str(shape.ranks_per_node)]
    return [python, "-P", "-m", "verl_slurm_daemon.agent.ranks", *place, *program]


def may_stand_by(config: RunConfig) -> bool:
    """Returns whether ranks of this run can be started ahead of a restart."""
    # Ray's are started by Ray, those in an image start with its runtime, and services share the node's cores
    # with ranks by their place in the run.
    ours = not config.trainer.on_ray and not ranks_inside(config) and not config.services
    return ours and config.daemon.standby_after_s is not None


def standby_argv(launcher: list[str], imports: Path) -> list[str]:
    """Returns the command of ranks that stand by. `launcher`: of the place that they will most likely have."""
    place = launcher[_PROGRAM : _PROGRAM + 3]
    return [*launcher[:_PROGRAM], "--stand-by", *place, str(imports)]


def orders_argv(launcher: list[str]) -> list[str]:
    """Returns what is left of `launcher_argv` for a launcher that stands by."""
    return launcher[_PROGRAM:]


_PROGRAM = len(("python", "-P", "-m", "verl_slurm_daemon.agent.ranks"))


def tracker_environment(paths: RunPaths, name: str) -> dict[str, str]:
    """Returns the names under which a run's attempts continue one run of its trackers, by variable."""
    digest = hashlib.sha256(str(paths.root).encode()).hexdigest()
    # MLflow is not among them: MLFLOW_RUN_ID has to name a run that exists.
    return {
        "TENSORBOARD_DIR": str(paths.tensorboard),
        "WANDB_RUN_ID": f"{name}-{digest[:8]}",
        # Not `must`: the first attempt finds none.
        "WANDB_RESUME": "allow",
        # Older releases take exactly 21 lower-case letters and digits.
        "SWANLAB_RUN_ID": digest[:21],
        "SWANLAB_RESUME": "allow",
    }


def launcher_env(
    environ: dict[str, str], config: RunConfig, paths: RunPaths, launch: Launch, control: Path
) -> dict[str, str]:
    """Builds the ranks' environment: ours, their place in the run (`wire.environment`), and their threads."""
    threads = config.distributed.threads_per_rank
    # An empty element of PYTHONPATH means the working directory, and PYTHONSAFEPATH does not affect that.
    environ = clean_environment(environ)
    # By default compiled code is loaded from /tmp/torchinductor_USER, which any user can create before us.
    own = {"TORCHINDUCTOR_CACHE_DIR": str(control / "torch"), "VLLM_RPC_BASE_PATH": str(control)}
    own["PYTHONHASHSEED"] = "0"  # a program that goes through a set of texts gets one order in all attempts
    flights = paths.flight(launch.attempt, launch.restart)
    own |= flight_environment(flights, control, config.health.flight_records)
    own |= tracker_environment(paths, config.name)
    fixed = {
        environment.CONTROL_VARIABLE: str(control),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    fixed["PYTHONSAFEPATH"] = "1"  # nothing is imported from the directory in which the user submitted
    # Our own trainer gets these in its command line; a guest's is the user's.
    if config.trainer.is_guest:
        fixed |= {
            environment.RUN_VARIABLE: str(paths.root),
            environment.ATTEMPT_VARIABLE: str(launch.attempt),
            environment.RESTART_VARIABLE: str(launch.restart),
            environment.RESUME_VARIABLE: launch.resume,
        }
    if threads:
        fixed |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    # In this order: the user's environment may replace `own`, and never what the run depends on.
    return own | environ | fixed
