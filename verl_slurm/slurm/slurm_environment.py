"""Reads SLURM_* of a batch process into a struct. The values come from outside: checked, then typed.

SLURM_RESTART_COUNT is unset at the first start, then 1, 2, ... SLURM_JOB_ID is the number that scontrol wants, also for
an array task (each task has its own; `ID_TASK` is for people) and for the first component of a heterogeneous job. 22.05
does not set SLURM_JOB_END_TIME, so it is not read.
"""

import re
from collections.abc import Mapping

import msgspec

from verl_slurm.base.errors import SlurmMissing
from verl_slurm.slurm.commands import NAME, NODE_LIST

_MOST_COMPONENTS = 128
"""Slurm's own limit (MAX_HET_JOB_COMPS)."""


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the job that this process is in."""

    job_id: int
    restart_count: int
    """0: the first start."""
    node_list: str
    """Slurm's bracket form; `SlurmClient.expand` lists it."""
    num_nodes: int
    node_name: str
    """Slurm's name for the node of this process."""
    cluster: str | None
    partition: str | None
    array_job_id: int | None = None
    array_task_id: int | None = None
    het_size: int = 1
    """Components of a heterogeneous job; `node_list` and `num_nodes` cover all of them."""
    sizes: tuple[int, ...] = ()
    """Nodes of each component; of a job that is not heterogeneous, its own."""

    @property
    def label(self) -> str:
        """Returns the number as people and squeue write it: `12`, or `12_3` in an array."""
        if self.array_job_id is not None and self.array_task_id is not None:
            return f"{self.array_job_id}_{self.array_task_id}"
        return str(self.job_id)

    @classmethod
    def from_environ(cls, env: Mapping[str, str]) -> "SlurmJob | None":
        """Returns the job, or None outside of one. Raises SlurmMissing: a value that Slurm never sets."""
        if not env.get("SLURM_JOB_ID"):
            return None
        het_size = _number(env, "SLURM_HET_SIZE", default=1)
        if het_size > _MOST_COMPONENTS:
            raise _refuse("SLURM_HET_SIZE", str(het_size), f"at most {_MOST_COMPONENTS}")
        # Each component of a heterogeneous job has variables of its own.
        parts = [f"_HET_GROUP_{number}" for number in range(het_size)] if het_size > 1 else [""]
        sizes = tuple(_number(env, f"SLURM_JOB_NUM_NODES{part}", least=1) for part in parts)
        return cls(
            job_id=_number(env, "SLURM_JOB_ID", least=1),
            restart_count=_number(env, "SLURM_RESTART_COUNT", default=0),
            node_list=",".join(_name(env, f"SLURM_JOB_NODELIST{part}", NODE_LIST) for part in parts),
            num_nodes=sum(sizes),
            node_name=_name(env, "SLURMD_NODENAME", NAME),
            cluster=_name(env, "SLURM_CLUSTER_NAME", NAME) if env.get("SLURM_CLUSTER_NAME") else None,
            partition=_name(env, "SLURM_JOB_PARTITION", NAME) if env.get("SLURM_JOB_PARTITION") else None,
            array_job_id=_optional_number(env, "SLURM_ARRAY_JOB_ID"),
            array_task_id=_optional_number(env, "SLURM_ARRAY_TASK_ID"),
            het_size=het_size,
            sizes=sizes,
        )


def _refuse(name: str, value: str | None, expected: str) -> SlurmMissing:
    return SlurmMissing(
        "the job's environment is not what Slurm sets",
        where=name,
        found="nothing" if value is None else value[:80],
        expected=expected,
        remedy=f"unset {name}, or start this through sbatch",
    )


def _number(env: Mapping[str, str], name: str, *, least: int = 0, default: int | None = None) -> int:
    value = env.get(name)
    if not value and default is not None:
        return default
    # ASCII digits, at most what Slurm's 32 bits hold: int() would accept blanks, signs and 1_000 too
    if value is None or re.fullmatch(r"\d{1,10}", value, re.ASCII) is None:
        raise _refuse(name, value, "a number")
    number = int(value)
    if not least <= number < 2**32:
        raise _refuse(name, value, f"a number from {least} to {2**32 - 1}")
    return number


def _optional_number(env: Mapping[str, str], name: str) -> int | None:
    return _number(env, name) if env.get(name) else None


def _name(env: Mapping[str, str], name: str, pattern: re.Pattern[str]) -> str:
    value = env.get(name)
    if value is None or pattern.fullmatch(value) is None:
        raise _refuse(name, value, "a node or partition name of Slurm")
    return value
