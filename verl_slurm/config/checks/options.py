"""Checks options for sbatch that a user writes by their long names. Pure."""

import re
from collections.abc import Iterator, Mapping

from verl_slurm.config.checks import Complaint
from verl_slurm.config.slurm_section import SlurmConfig

_LONG_OPTION = re.compile(r"[a-z][a-z0-9-]{1,40}")
OWN_OPTIONS = {
    "array": "",
    "cpus-per-task": "slurm.cpus_per_node",
    "error": "",
    "export": "env",
    "export-file": "env",
    "gpus-per-node": "slurm.gpus_per_node",
    "help": "",
    "job-name": "name",
    "mem": "slurm.mem_mb_per_node",
    "no-requeue": "",
    "nodes": "distributed.nodes",
    "ntasks": "",
    "ntasks-per-node": "",
    "open-mode": "",
    "output": "run_dir",
    "parsable": "",
    "requeue": "",
    "signal": "slurm.signal_lead_s",
    "test-only": "",
    "time": "slurm.time_limit_min",
    "usage": "",
    "version": "",
    "wait": "",
    "wrap": "",
}
"""Options that submit sets itself, and the keys that say so; a second value would contradict the daemon."""
_REFUSED = {
    "cpus-per-gpu": (
        "excludes --cpus-per-task, which submit always writes",
        "the CPUs of a node in slurm.cpus_per_node",
        "multiply it by the GPUs of a node: slurm.cpus_per_node=N",
    ),
    "deadline": (
        "Slurm drops a requeued job that cannot end before it (state DEADLINE)",
        "no deadline",
        "slurm.time_limit_min limits each start; `verl-slurm cancel RUN` ends the run",
    ),
}
"""Options that a run cannot have: what is wrong with them, what is expected, and what to do."""
_GPUS = ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task")


def asks_for_gpus(options: Mapping[str, str | int | bool]) -> bool:
    """Returns whether these options ask for GPUs: then submit writes no `--gpus-per-node` beside them. Pure."""
    gres = str(options.get("gres") or "")
    return any(option in options for option in _GPUS) or bool(re.search(r"(?:^|[,/])gpu(?:$|[,:=])", gres))


def extra_complaints(slurm: SlurmConfig) -> Iterator[Complaint]:
    """Yields the options of `slurm.extra` that contradict what submit writes."""
    # Where their keys are 0 these are not written: `mem: 0` is all memory of a node.
    written = {"gpus-per-node": slurm.gpus_per_node, "mem": slurm.mem_mb_per_node}
    for option in slurm.extra:
        key = f"slurm.extra.{option}"
        if option in OWN_OPTIONS and written.get(option, True):
            own = OWN_OPTIONS[option]
            remedy = f"remove it; {own} says it" if own else "remove it"
            if option == "gpus-per-node":
                remedy = (
                    f"a type of GPU is written slurm.extra.gres=gpu:TYPE:{slurm.gpus_per_node}, beside {own}"
                )
            yield Complaint(key, "an option that submit sets itself", "another option", remedy)
        elif option in _REFUSED:
            yield Complaint(key, *_REFUSED[option])
        elif option in ("mem-per-cpu", "mem-per-gpu") and slurm.mem_mb_per_node:
            found = f"set, beside slurm.mem_mb_per_node={slurm.mem_mb_per_node}"
            yield Complaint(key, found, "one of them", f"set slurm.mem_mb_per_node=0, or remove {key}")
        elif option in ("clusters", "cluster-constraint") and "," in str(slurm.extra[option]):
            yield Complaint(
                key,
                str(slurm.extra[option]),
                "one cluster: a run stays where its job was queued",
                "name one of them",
            )


def option_complaints(key: str, options: Mapping[str, str | int | bool]) -> Iterator[Complaint]:
    """Yields the options that are misspelt, and values that would begin a line of their own."""
    for option, value in options.items():
        if not _LONG_OPTION.fullmatch(option):
            yield Complaint(
                f"{key}.{option!r}", "not an option", "sbatch's long name without dashes", "e.g. constraint"
            )
        elif isinstance(value, str) and not value.isprintable():
            # A line break would end the #SBATCH line and start a command of its own.
            yield Complaint(f"{key}.{option}", repr(value), "one line of text", "remove the line break")
