"""Builds the command lines of a restart as values: srun for the agents, `ranks` or Ray for the ranks. Pure."""

from pathlib import Path

from verl_slurm.base.paths import RunPaths
from verl_slurm.base.search_path import clean_environment
from verl_slurm.config.schema import RunConfig
from verl_slurm.wire.environment import (
    CONTROL_VARIABLE,
    EPOCH_VARIABLE,
    GENERATION_VARIABLE,
    RESUME_VARIABLE,
    RUN_VARIABLE,
)
from verl_slurm.wire.messages import Launch

__all__ = ["agent_argv", "container_places", "launcher_argv", "launcher_env", "step_argv"]


def agent_argv(python: str, paths: RunPaths, epoch: int) -> list[str]:
    """Returns the command line of one agent."""
    # -P: the directory in which the user submitted is not searched for modules; one planted there was imported before
    # us.
    return [python, "-P", "-m", "verl_slurm_daemon", "agent", "--run", str(paths.root), "--epoch", str(epoch)]


def step_argv(srun: str, config: RunConfig, agent: list[str], *, het_size: int = 1) -> list[str]:
    """Returns the command line of a Slurm step with an agent on every node of the job.

    Args:
        agent: Python and its arguments.
        het_size: components of the job. Above 1, each component brings its own number of nodes.
    """
    nodes = config.distributed.nodes
    counts = [f"--nodes={nodes}", f"--ntasks={nodes}"]
    if het_size > 1:
        # srun counts the tasks of each component by itself; SLURM_NODEID counts over all of them (seen on 22.05.8).
        counts = ["--het-group=" + ",".join(str(number) for number in range(het_size))]
    argv = [
        srun,
        *counts,
        "--ntasks-per-node=1",
        # Repeated: since 22.05 srun does not take it from the job.
        f"--cpus-per-task={config.slurm.cpus_per_node}",
        "--overlap",  # saved parts may have to be fetched while the ranks' step runs
        # The end of one agent says nothing about the others; the lead decides.
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",
        "--cpu-bind=none",
        "--input=none",
        "--quiet",
    ]
    return [*argv, *_contained(config, agent)]


def _contained(config: RunConfig, agent: list[str]) -> list[str]:
    """Wraps `agent` in the container image, if one is configured. The run's paths are the same inside and outside."""
    container = config.slurm.container
    if container is None:
        return agent
    inside = [container.python, *agent[1:]]
    binds = ",".join(f"{place}:{place}" for place in container_places(config))
    if container.runtime == "pyxis":
        return [f"--container-image={container.image}", f"--container-mounts={binds}", *inside]
    gpus = ["--nv"] if config.distributed.device == "cuda" else []
    return ["apptainer", "exec", *gpus, f"--bind={binds}", container.image, *inside]


def container_places(config: RunConfig) -> list[str]:
    """Lists the directories that a container must see: the run's, its inputs', the second copy's, and the
    user's own.
    """
    reward = config.model.reward.partition(":")
    wanted = [config.run_dir, config.model.path, config.data.root, config.data.eval_root or ""]
    wanted += [reward[2] if reward[0] == "classifier" else "", config.checkpoint.local_dir or ""]
    wanted += [str(Path(word).parent) for word in config.trainer.command[:1] if word.startswith("/")]
    wanted += config.slurm.container.binds if config.slurm.container else []
    return sorted({place for place in wanted if place.startswith("/")})


def launcher_argv(
    python: str, config: RunConfig, paths: RunPaths, launch: Launch, scratch: Path
) -> list[str]:
    """Returns the command that starts the ranks of one node: `ranks` for our trainer and most guests, Ray for
    verl's PPO.

    Args:
        scratch: a private directory of this node; the agent removes it.
    """
    life = ["--run", str(paths.root), "--epoch", str(launch.epoch), "--resume", launch.resume]
    trainer, shape = config.trainer, config.distributed
    if trainer.on_ray:
        here = ["--node-rank", str(launch.node_rank), "--head", f"{launch.master_addr}:{launch.master_port}"]
        return [python, "-P", "-m", "verl_slurm.loops.verl_node", *life, *here, "--scratch", str(scratch)]
    if trainer.backend == "verl":
        # verl's SFT is one process for each rank, as torchrun would start it, and needs no Ray.
        program = ["-m", "verl_slurm.loops.verl_sft", *life]
    elif trainer.backend == "command":
        program = list(trainer.command)
    else:
        program = ["-m", "verl_slurm.trainer", *life]
    place = [str(shape.nodes), str(launch.node_rank), str(shape.ranks_per_node)]
    return [python, "-P", "-m", "verl_slurm_daemon.agent.ranks", *place, *program]


def launcher_env(
    environ: dict[str, str], config: RunConfig, paths: RunPaths, launch: Launch, control: Path
) -> dict[str, str]:
    """Builds the ranks' environment: our variables, their place in the run (`wire.environment`), and a fixed
    number of threads.

    Args:
        control: a directory with mode 0700 and an unguessable name; this agent creates and removes it.
    """
    threads = config.distributed.threads_per_rank
    # An empty element of PYTHONPATH means the working directory, and PYTHONSAFEPATH does not affect that.
    environ = clean_environment(environ)
    # By default compiled code is loaded from /tmp/torchinductor_USER, which any user can create before us.
    own = {"TORCHINDUCTOR_CACHE_DIR": str(control / "torch"), "VLLM_RPC_BASE_PATH": str(control)}
    fixed = {CONTROL_VARIABLE: str(control), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    fixed["PYTHONSAFEPATH"] = "1"  # nothing is imported from the directory in which the user submitted
    # Our own trainer gets these in its command line; a guest's is the user's.
    if config.trainer.is_guest:
        fixed |= {
            RUN_VARIABLE: str(paths.root),
            EPOCH_VARIABLE: str(launch.epoch),
            GENERATION_VARIABLE: str(launch.generation),
            RESUME_VARIABLE: launch.resume,
        }
    program = config.trainer.command[:1]
    # The user named the file, so its neighbours may be imported as well.
    if program and program[0].endswith(".py"):
        inherited = environ.get("PYTHONPATH", "")
        fixed["PYTHONPATH"] = ":".join(part for part in (inherited, str(Path(program[0]).parent)) if part)
    if threads:
        fixed |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    # In this order: the user's environment may replace `own`, and never what the run depends on.
    return own | environ | fixed
