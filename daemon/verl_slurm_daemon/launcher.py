"""The command lines of a generation, as values: srun for the agents, torchrun for the ranks. Pure."""

from pathlib import Path

from verl_slurm.config.schema import RunConfig
from verl_slurm.paths import RunPaths
from verl_slurm.wire.messages import Launch

__all__ = ["agent_argv", "launcher_argv", "launcher_env", "step_argv"]

CONTROL_VARIABLE = "VERL_SLURM_CONTROL"


def agent_argv(python: str, paths: RunPaths, epoch: int) -> list[str]:
    """One agent."""
    return [python, "-P", "-m", "verl_slurm_daemon", "agent", "--run", str(paths.root), "--epoch", str(epoch)]


def step_argv(srun: str, config: RunConfig, agent: list[str]) -> list[str]:
    """One Slurm step with an agent on every node of the job.

    `--kill-on-bad-exit=0` and `--wait=0`: one agent's end says nothing about the others; the lead decides.
    `--cpus-per-task` is repeated because srun no longer takes it from the job (since 22.05).
    """
    nodes = config.distributed.nodes
    argv = [
        srun,
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={config.slurm.cpus_per_node}",
        "--overlap",  # a save may have to be brought home while the ranks' step runs
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",
        "--cpu-bind=none",
        "--input=none",
        "--quiet",
    ]
    return [*argv, *agent]


def launcher_argv(
    python: str, config: RunConfig, paths: RunPaths, launch: Launch, scratch: Path
) -> list[str]:
    """The ranks of one node through torch.distributed.run, static rendezvous.

    `--max-restarts=0`: a restart is the lead's decision, for all nodes at once. `--signals-to-handle=SIGQUIT`:
    torchrun would otherwise take its handlers for SIGTERM and the like, and kill its workers at Slurm's warning.
    `--shutdown-timeout=1`: its SIGTERM to the siblings of a dead rank is ignored like Slurm's; KILL follows then, not
    after torchrun's 30 s. `--log-dir`: it would leave an empty tree in /tmp at each start; `scratch` is removed.
    """
    shape = config.distributed
    return [
        python,
        "-P",
        "-m",
        "torch.distributed.run",
        f"--nnodes={shape.nodes}",
        f"--nproc-per-node={shape.ranks_per_node}",
        f"--node-rank={launch.node_rank}",
        f"--master-addr={launch.master_addr}",
        f"--master-port={launch.master_port}",
        "--max-restarts=0",
        "--signals-to-handle=SIGQUIT",
        "--shutdown-timeout=1",
        f"--log-dir={scratch}",
        "-m",
        "--",  # else torchrun takes --run for an abbreviation of its own --run-path
        "verl_slurm.trainer",
        "--run",
        str(paths.root),
        "--epoch",
        str(launch.epoch),
        "--resume",
        launch.resume,
    ]


def launcher_env(environ: dict[str, str], config: RunConfig, control: Path) -> dict[str, str]:
    """The ranks' environment: ours, the control directory, and a fixed number of threads."""
    threads = config.distributed.threads_per_rank
    fixed = {CONTROL_VARIABLE: str(control), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    fixed["PYTHONSAFEPATH"] = "1"  # nothing is imported from wherever the user stood when he submitted
    if threads:
        fixed |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return environ | fixed
