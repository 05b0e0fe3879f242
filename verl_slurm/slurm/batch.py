"""Builds what a run asks of sbatch. Pure: reads no disk, asks no Slurm.

Four choices of the batch script carry the design (measured, Slurm 22.05 and 24.11):

* `--signal=B:USR1@N` warns the batch process alone. Without `B:` every process of every step gets the signal, and any
  process without a handler dies of it.
* the last line is `exec python ...`: Python becomes the batch process, and gets the signal itself.
* `trap ''` before it: a warning in the half second before the daemon listens is ignored instead of killing the shell,
  and an ignored signal stays ignored over `exec`.
* the script waits for Python (`AWAIT`): without it there is nothing of ours that could ask for another start.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

from verl_slurm.base.paths import RunPaths
from verl_slurm.base.search_path import PYTHONPATH, clean_environment
from verl_slurm.config.checks.options import asks_for_gpus
from verl_slurm.config.schema import RunConfig, nodes_of_components
from verl_slurm.wire.environment import CONTROL_VARIABLE, DEVCLUSTER_VARIABLE, SEARCH_VARIABLE, UMASK_VARIABLE

# The next start begins ten minutes later: no nodes are held meanwhile. The scripts in `sbatch/` repeat it,
# since Slurm runs a copy of a script, beside which nothing lies.
AWAIT = """\
verl_slurm_await() { # until this command succeeds: its file system may come late
    local tries said later='' how=requeue job='' answer='' asked='' taken=''
    for ((tries = 0; tries < 60; tries++)); do
        if said=$("$@" 2>&1); then return; fi
        ((tries)) || echo "verl-slurm: $* fails on $HOSTNAME: waits a minute for its file system: ${said##*$'\\n'}"
        sleep 1
    done
    # After 24 starts a person has to look.
    ((${SLURM_RESTART_COUNT:-0} % 24 < 23)) || how=requeuehold
    # For five minutes a slurmctld that is busy, or starts again, ends no job.
    for ((tries = 0; tries < 60; tries++)); do
        ((tries == 0)) || sleep 5
        job=$(scontrol -o show job "$SLURM_JOB_ID") || continue
        # A job that is cancelled would be revived. One that we asked about before was requeued, its answer lost.
        [[ $job =~ \\ JobState=(RUNNING|SIGNALING|RESIZING|STOPPED)\\  ]] || { taken=$asked && break; }
        if answer=$(scontrol $how "$SLURM_JOB_ID" 2>&1); then taken=yes && break; fi
        [[ $answer != *disabled* ]] || break # --no-requeue
        asked=yes
    done
    if [[ $taken ]]; then
        [[ $how == requeuehold ]] || later=StartTime=now+600
        # `verl-slurm status` shows it: the log may lie where nothing can be written.
        scontrol update JobId="$SLURM_JOB_ID" ${later:+"$later"} \\
            Comment="verl-slurm: $(date +%FT%R) $HOSTNAME: $* fails: ${said##*$'\\n'}" || true
        echo "verl-slurm: $* still fails: $how; if the job is held: scontrol release $SLURM_JOB_ID"
        exit 25
    fi
    echo "verl-slurm: $* still fails, and Slurm takes no requeue${answer:+ ($answer)}: verl-slurm submit RUN goes on"
    exit 127
}"""
"""The shell's function that waits a minute for a program, and asks for another start if it does not come."""
# Variables that sbatch reads before the script (man sbatch, INPUT ENVIRONMENT VARIABLES): a forgotten SBATCH_NO_REQUEUE
# would silently override our `--requeue`. Also those of a job that we are inside of, which srun in the new job would
# take for its own.
_SBATCH_VARIABLE = re.compile(r"SBATCH_.+|SLURM_.+|SLURMD_.+|PMI_.+|PMIX_.+|PMI2_.+|SUBMITIT_.+")
# What a run gives its own processes. A program of one may submit another run, to which they are not the user's.
_OF_A_RUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.+|TORCH_GLOO_LAZY_INIT"
    r"|TORCH_FR_(BUFFER_SIZE|DUMP_TEMP_FILE)|(OMP|MKL)_NUM_THREADS|PYTHONHASHSEED|TENSORBOARD_DIR"
    r"|TORCH_NCCL_(ASYNC_ERROR_HANDLING|DUMP_ON_TIMEOUT|DEBUG_INFO_PIPE_FILE)"
    r"|TORCHINDUCTOR_CACHE_DIR|VLLM_RPC_BASE_PATH|(WANDB|SWANLAB)_(RUN_ID|RESUME)"
    r"|RAY_(ADDRESS|AUTH_MODE|AUTH_TOKEN_PATH|JOB_ID)"
)
_KEEP = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", "SLURM_CONF_SERVER"}
_KEEP |= {DEVCLUSTER_VARIABLE, UMASK_VARIABLE}
_GLOO = "GLOO_SOCKET_IFNAME"
_KEEP_UNLESS_SET = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CLUSTERS": "clusters",
}


def awaiting(python: str, paths: RunPaths) -> list[str]:
    """Returns the lines of a batch script that wait for RUN, Python and our packages, and then log into RUN."""
    # Slurm itself ends a job for good whose output it cannot open (`ExitCode=0:53`).
    log = f'{shlex.quote(str(paths.logs))}/"${{SLURM_JOB_ID}}"_0_log.out'
    there = ["test", "-e", str(paths.run_yaml)], ["mkdir", "-p", str(paths.logs)]
    commands = *map(shlex.join, there), f"touch {log}"
    installed = shlex.join([python, "-P", "-c", "import verl_slurm_daemon, verl_slurm"])
    # Without these two the lead starts nothing, and can ask for no other start; PATH is that of the login node.
    needed = "type scontrol", "type srun", installed
    waits = [f"verl_slurm_await {command}" for command in (*commands, *needed)]
    return [AWAIT, *waits[:3], f"exec >>{log} 2>&1", *waits[3:]]


def sbatch_parameters(
    config: RunConfig,
    *,
    expedite: bool = False,
    after: str = "",
    avoids: Sequence[str] = (),
    waits: Sequence[str] = (),
) -> dict[str, object]:
    """Returns keyword arguments of submitit's `SlurmExecutor.update_parameters`.

    Args:
        expedite: Slurm offers `--requeue=expedite`, and the configuration wants it (`requeue_rules.py`).
        after: id of a job that must have ended for good before this one starts; empty: none.
        avoids: nodes to stay away from, beside those that the user excludes.
    """
    slurm = config.slurm
    requeue = "expedite" if expedite else True
    # B: the batch process alone is warned. A step would get the signal in all of its processes, and those without a
    # handler die of it.
    additional: dict[str, object] = {"signal": f"B:USR1@{slurm.signal_lead_s}", "requeue": requeue}
    # The loss of a node ends the job otherwise. Slurm takes the node from the job, which goes on without it.
    if config.may_lose_nodes:
        additional["no-kill"] = True
    if slurm.account is not None:
        additional["account"] = slurm.account
    if slurm.qos is not None:
        additional["qos"] = slurm.qos
    # False means "not given": submitit would write `--exclusive=False`.
    additional |= {option: value for option, value in slurm.extra.items() if value is not False}
    if waits:
        additional["output"] = "/dev/null"  # until the script itself opens RUN's log
    if after:
        own = additional.get("dependency")
        additional["dependency"] = f"{own},afterany:{after}" if own else f"afterany:{after}"
    if avoids:
        own = additional.get("exclude")
        additional["exclude"] = ",".join([str(own)] * bool(own) + list(avoids))
    most = nodes_of_components(config.held_nodes, config.services)[0]
    parameters: dict[str, object] = {
        "job_name": config.name,
        "time": slurm.time_limit_min,
        "nodes": most,
        "ntasks_per_node": 1,
        "cpus_per_task": slurm.cpus_per_node,
        # The callable runs once, as the batch process, which gets the `B:` signals itself.
        "use_srun": False,
        "stderr_to_stdout": True,
        # Ignored over exec, until the daemon listens: a warning in between would kill the batch process.
        "setup": ["trap '' USR1 USR2 TERM CONT", *waits],
        "additional_parameters": additional,
    }
    if config.may_lose_nodes:
        least = nodes_of_components(config.least_nodes, config.services)[0]
        # A range, so that no start waits for spare nodes. submitit calculates with the number of nodes above, which
        # stays. With a number of tasks per node, Slurm would give the fewest (22.05).
        additional["nodes"] = f"{least}-{most}"
        del parameters["ntasks_per_node"]
    if slurm.partition is not None:
        parameters["partition"] = slurm.partition
    # In `extra` they may be asked for in other words, e.g. by their type; Slurm refuses both together.
    if slurm.gpus_per_node and not asks_for_gpus(slurm.extra):
        parameters["gpus_per_node"] = slurm.gpus_per_node
    if slurm.mem_mb_per_node:
        parameters["mem"] = f"{slurm.mem_mb_per_node}MB"
    return parameters


def component_lines(config: RunConfig, requeue: str = "--requeue") -> list[str]:
    """Returns the lines of a batch script for the further components of a heterogeneous job: a service's
    nodes each.

    What the first component asks for by its name holds for them too, unless the service says otherwise.
    """
    slurm, lines = config.slurm, list[str]()
    for name, service in config.services.items():
        if not service.is_apart:
            continue
        # No `signal`: the lead is in the first component, so the warning before the limit goes there alone.
        options: dict[str, object] = {"job-name": config.name, "time": slurm.time_limit_min}
        options |= {
            "nodes": service.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": config.cpus_on_nodes_of(name),
        }
        named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
        options |= {option: value for option, value in named.items() if value is not None}
        if service.gpus and not asks_for_gpus(service.slurm):
            options["gpus-per-node"] = service.gpus
        options |= {option: value for option, value in service.slurm.items() if value is not False}
        words = [
            f"--{option}" if value is True else f"--{option}={shlex.quote(str(value))}"
            for option, value in options.items()
        ]
        # Slurm requeues all components or none, so they have the first one's option.
        lines += ["#SBATCH hetjob", *(f"#SBATCH {word}" for word in [*words, requeue])]
    return lines


def sbatch_options(config: RunConfig) -> list[str]:
    """Returns the same as command-line options for a hand-written batch script (`batch_script`)."""
    parameters = sbatch_parameters(config)
    additional = parameters.pop("additional_parameters")
    assert isinstance(additional, dict)
    for inner in ("use_srun", "stderr_to_stdout", "setup"):
        del parameters[inner]
    options = {name.replace("_", "-"): value for name, value in (parameters | additional).items()}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in sorted(options.items())]


def batch_script(config: RunConfig) -> str:
    """Returns the script of `sbatch/` that goes with these options."""
    # Its script looks for the plugin. The other runtimes are started by agents, as ranks without one are.
    if config.slurm.container is not None and config.slurm.container.runtime == "pyxis":
        return "pyxis.sbatch"
    if any(service.is_apart for service in config.services.values()):
        return "heterogeneous.sbatch"
    return "single_node.sbatch" if config.all_nodes == 1 else "multi_node.sbatch"


def unwanted_environment(names: list[str], config: RunConfig) -> list[str]:
    """Lists the variables to leave out when submitting."""
    kept = _KEEP | set(_kept(config).values())
    return [name for name in names if _SBATCH_VARIABLE.fullmatch(name) and name not in kept]


def _kept(config: RunConfig) -> dict[str, str]:
    """Returns the options that no key gives, and the variable that may give each."""
    given = {"account": config.slurm.account, "partition": config.slurm.partition, "qos": config.slurm.qos}
    chosen = {option for option, value in given.items() if value is not None} | set(config.slurm.extra)
    # sbatch takes a variable for all components, and before the lines of the script.
    chosen |= {option for service in config.services.values() for option in service.slurm}
    return {option: name for name, option in _KEEP_UNLESS_SET.items() if option not in chosen}


def obeyed_variables(environ: Mapping[str, str], config: RunConfig) -> dict[str, str]:
    """Returns the options that the job takes from the shell that submits, and the variable of each."""
    return {option: name for option, name in _kept(config).items() if environ.get(name)}


def asked_partition(environ: Mapping[str, str], config: RunConfig) -> str | None:
    """Returns the partition, or several, that the job asks for; None: the default one."""
    obeyed = obeyed_variables(environ, config)
    return environ[obeyed["partition"]] if "partition" in obeyed else config.slurm.partition


def submission_environment(environ: Mapping[str, str], config: RunConfig) -> dict[str, str]:
    """Returns the environment of sbatch: `environ` without those, without what another run gave this process, and
    without imports from the working directory.
    """
    gone = set(unwanted_environment(list(environ), config))
    gone |= {name for name in environ if name.startswith("VERL_SLURM_")} - _KEEP
    if CONTROL_VARIABLE in environ:
        gone |= {name for name in environ if _OF_A_RUN.fullmatch(name)}
        if environ.get(_GLOO) == "lo":  # ours, of a run on one node
            gone.add(_GLOO)
    # In that run PYTHONPATH names its copies of code: the places that the user named count.
    path = environ.get(SEARCH_VARIABLE, environ.get(PYTHONPATH))
    kept = {name: value for name, value in environ.items() if name not in {*gone, PYTHONPATH}}
    kept = clean_environment(kept | ({PYTHONPATH: path} if path else {}))
    # submitit starts its local controller by `python -m` without -P, which would look in the working directory first.
    return kept | {"PYTHONSAFEPATH": "1"}
