"""Builds Slurm's command lines, as lists. Pure; no command passes through a shell.

The first word is the program's bare name; the client replaces it by the absolute path it found. Values come
typed and validated (`slurm_environment.py`), so none can be an option: numbers are ints, names match `NAME`.
"""

import re
from collections.abc import Iterable
from datetime import datetime

from verl_slurm.base.errors import NotFound

# None of these begins with a dash, so no value can be taken for an option.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
"""A node's, partition's or cluster's name."""
PARTITIONS = re.compile(rf"{NAME.pattern}(,{NAME.pattern})*")
NODE_LIST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]{0,65535}")
"""Slurm's bracket form: `gpu[01-04,07],login1`."""
JOB = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?")
"""A job, or one task of an array: `JobFacts.target`."""
DEPENDENCY = re.compile(r"[A-Za-z0-9_:+*,]{1,4096}")
WORK_DIR = "|//|"
"""Stands before a job's working directory, in whose path it cannot be, as a `|` can."""


def _checked(pattern: re.Pattern[str], value: str) -> str:
    # No name of Slurm's, so nothing there has it. Never an option, or a second word.
    if not pattern.fullmatch(value):
        raise NotFound("Slurm has nothing of this name", where=repr(value), remedy="sinfo lists its names")
    return value


def show_job(job_id: int) -> list[str]:
    """Shows all of one job, in the many-line form (see parse.py)."""
    # Not -o: in one long line, free text such as a job's name could forge a field.
    return ["scontrol", "show", "job", str(job_id)]


def show_job_json(job_id: int) -> list[str]:
    """Shows the same as JSON, if scontrol can (see `parse.ended_as`)."""
    return [*show_job(job_id), "--json"]


def show_node(name: str) -> list[str]:
    # --all, here and below: Slurm shows no hidden partition otherwise, none that the user's groups have lost, and
    # neither their nodes nor the user's own jobs there. `show job`, sinfo with --partition, and sacct show them.
    return ["scontrol", "show", "node", _checked(NAME, name), "--all"]


def show_nodes(node_list: str) -> list[str]:
    """Shows all nodes of a job in one command."""
    return ["scontrol", "show", "node", _checked(NODE_LIST, node_list), "--all"]


def show_partition(name: str) -> list[str]:
    return ["scontrol", "show", "partition", _checked(NAME, name), "--all"]


def show_partitions(*, hidden: bool = False) -> list[str]:
    return ["scontrol", "show", "partition", *(["--all"] if hidden else [])]


def show_reservation(name: str) -> list[str]:
    return ["scontrol", "show", "reservation", _checked(NAME, name)]


def list_nodes(partition: str) -> list[str]:
    """Lists one line per node: name, state, features, generic resources. Far less text than `scontrol show node`."""
    return [
        "sinfo",
        "--noheader",
        "--Node",
        f"--partition={_checked(PARTITIONS, partition)}",
        "--format=%N|%t|%f|%G",
    ]


def list_jobs() -> list[str]:
    """Lists one line for each of our unfinished jobs: its name, number, command and working directory."""
    return ["squeue", "--me", "--all", "--noheader", f"--format=%i|%A|%o{WORK_DIR}%Z"]


def list_dependencies() -> list[str]:
    """Lists one line for each of our waiting jobs: number, what it still waits for, command."""
    return ["squeue", "--me", "--all", "--noheader", "--states=PENDING", "--format=%A|%E|%o"]


def sbatch_help() -> list[str]:
    """Asks sbatch itself; no controller is asked."""
    return ["sbatch", "--help"]


def list_states(users: Iterable[int]) -> list[str]:
    """Lists one line for each unfinished job of these users (uids): `parse.parse_states` reads it."""
    listed = ",".join(str(int(user)) for user in sorted(users))
    # By user: one question for all runs, however many there are.
    return [
        "squeue",
        "--all",
        "--noheader",
        f"--user={listed}",
        f"--format=%A|%T|%r|%o{WORK_DIR}%Z{WORK_DIR}%k",
    ]


def list_past_jobs(partition: str, days: int) -> list[str]:
    """Lists one line for each start of our jobs there since so many days: state, eligible, start, seconds it ran."""
    return [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        # Each start of a job that was requeued, not the last alone.
        "--duplicates",
        f"--starttime=now-{int(days)}days",
        f"--partition={_checked(PARTITIONS, partition)}",
        "--format=State,Eligible,Start,ElapsedRaw",
    ]


def show_config() -> list[str]:
    return ["scontrol", "show", "config"]


def show_hostnames(node_list: str) -> list[str]:
    return ["scontrol", "show", "hostnames", _checked(NODE_LIST, node_list)]


def requeue(job: str, *, hold: bool = False) -> list[str]:
    """Ends the running job (TERM now, KILL after KillWait) and queues it again, or holds it (`scontrol release`)."""
    return ["scontrol", "requeuehold" if hold else "requeue", _checked(JOB, job)]


def forbid_requeue(job: str) -> list[str]:
    """Does later what `--no-requeue` does at submission."""
    return ["scontrol", "update", f"JobId={_checked(JOB, job)}", "Requeue=0"]


def keep_node(job: str, node: str) -> list[str]:
    """Takes all other nodes from a running job."""
    return ["scontrol", "update", f"JobId={_checked(JOB, job)}", f"NodeList={_checked(NODE_LIST, node)}"]


def update_start_time(job: str, start: datetime) -> list[str]:
    """Forbids a start before `start`, a time of slurmctld's clock."""
    # In seconds since 1970 (`uts`): scontrol reads `now+10` by its node's clock and a date by its time zone (22.05.8).
    return ["scontrol", "update", f"JobId={_checked(JOB, job)}", f"StartTime=uts{int(start.timestamp())}"]


def update_excluded(job: str, nodes: str) -> list[str]:
    """Sets the nodes that the job avoids; empty: none."""
    return [
        "scontrol",
        "update",
        f"JobId={_checked(JOB, job)}",
        # Taken for a job that is COMPLETING, too (22.05.8): the exclusion is set after the requeue.
        f"ExcNodeList={_checked(NODE_LIST, nodes) if nodes else ''}",
    ]


def update_dependency(job: str, dependency: str) -> list[str]:
    """Sets what a waiting job waits for."""
    return [
        "scontrol",
        "update",
        f"JobId={_checked(JOB, job)}",
        f"Dependency={_checked(DEPENDENCY, dependency)}",
    ]


def signal_batch(job: str, signal: str) -> list[str]:
    """Signals the batch process alone, which is the lead; the steps do not get it."""
    # --batch: a signal to a step reaches every process in it, and those without a handler die of it.
    return ["scancel", "--batch", f"--signal={_checked(NAME, signal)}", _checked(JOB, job)]


def cancel(job: str) -> list[str]:
    return ["scancel", _checked(JOB, job)]
