"""Checks options for sbatch that a user writes by their long names. Pure."""

import re
from collections.abc import Mapping

from verl_slurm.config.checks import Complaints
from verl_slurm.config.schema import SlurmConfig

_LONG_OPTION = re.compile(r"[a-z][a-z0-9-]{1,40}")
OWN_OPTIONS = {
    **dict.fromkeys(("array", "error", "help", "no-requeue", "ntasks", "ntasks-per-node", "open-mode"), ""),
    **dict.fromkeys(("parsable", "requeue", "test-only", "usage", "version", "wait", "wrap"), ""),
    "account": "slurm.account",
    "cpus-per-task": "slurm.cpus_per_node",
    "export": "env",
    "export-file": "env",
    "gpus-per-node": "slurm.gpus_per_node",
    "job-name": "name",
    "mem": "slurm.mem_mb_per_node",
    "nodes": "distributed.nodes",
    "output": "run_dir",
    "partition": "slurm.partition",
    "qos": "slurm.qos",
    "signal": "slurm.signal_lead_s",
    "time": "slurm.time_limit_min",
}
"""Options that submit sets itself, and the keys that say so; a second value would contradict the daemon."""
# Options that a run cannot have: what is expected, what to do, and what is wrong with them.
_REFUSED = {
    "cpus-per-gpu": (
        "the CPUs of a node in slurm.cpus_per_node",
        "multiply it by the GPUs of a node: slurm.cpus_per_node=N",
        "excludes --cpus-per-task, which submit always writes",
    ),
    "deadline": (
        "no deadline",
        "slurm.time_limit_min limits each start; `verl-slurm cancel RUN` ends the run",
        "Slurm drops a requeued job that cannot end before it (state DEADLINE)",
    ),
}
_GPUS = ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task")


def asks_for_gpus(options: Mapping[str, str | int | bool]) -> bool:
    """Returns whether these options ask for GPUs. Pure."""
    gres = str(options.get("gres") or "")
    # Then submit writes no `--gpus-per-node` beside them.
    return any(option in options for option in _GPUS) or bool(re.search(r"(?:^|[,/])gpu(?:$|[,:=])", gres))


def check_extra(slurm: SlurmConfig, found: Complaints) -> None:
    """Refuses the options of `slurm.extra` that contradict what submit writes."""
    # Where their keys are 0 these are not written: `mem: 0` is all memory of a node.
    written = {"gpus-per-node": slurm.gpus_per_node, "mem": slurm.mem_mb_per_node}
    typed = f"a type of GPU is written slurm.extra.gres=gpu:TYPE:{slurm.gpus_per_node}, beside slurm.gpus_per_node"
    for option, value in slurm.extra.items():
        key, own = f"slurm.extra.{option}", OWN_OPTIONS.get(option)
        if own is not None and written.get(option, True):
            says = typed if option == "gpus-per-node" else f"remove it; {own} says it" if own else "remove it"
            found.refuse_if(True, key, "another option", says, "an option that submit sets itself")
        elif option in _REFUSED:
            found.refuse_if(True, key, *_REFUSED[option])
        memory = slurm.mem_mb_per_node and option in ("mem-per-cpu", "mem-per-gpu")
        beside = f"set, beside slurm.mem_mb_per_node={slurm.mem_mb_per_node}"
        found.refuse_if(memory, key, "one of them", f"set slurm.mem_mb_per_node=0, or remove {key}", beside)
        several = option in ("clusters", "cluster-constraint") and "," in str(value)
        found.refuse_if(several, key, "one cluster: a run stays where its job was queued", "name one of them")


def check_options(key: str, options: Mapping[str, str | int | bool], found: Complaints) -> None:
    """Refuses options that are misspelt, and values that would begin a line of their own."""
    for option, value in options.items():
        # A line break would end the #SBATCH line and start a command of its own.
        long, broken = "sbatch's long name without dashes", isinstance(value, str) and not value.isprintable()
        if _LONG_OPTION.fullmatch(option):
            found.refuse_if(
                broken, f"{key}.{option}", "one line of text", "remove the line break", repr(value)
            )
        else:
            found.refuse_if(True, f"{key}.{option!r}", long, "e.g. constraint", "not an option")
