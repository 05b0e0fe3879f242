"""Declares the section `slurm` of a configuration, in the manner of `schema.py`."""

from typing import Annotated, Literal

import msgspec

from verl_slurm.config.container_section import ContainerConfig
from verl_slurm.config.section import NonNegative, Positive, Section


class SlurmConfig(Section, frozen=True):
    """Sets what the run asks of Slurm."""

    partition: str | None = None
    """null: Slurm's default one. Several, `a,b`: Slurm takes the one that can start the job first."""
    account: str | None = None
    """Account that pays for the job. null: your default one."""
    qos: str | None = None
    """Quality of service of the job. null: the account's default one."""
    time_limit_min: Positive = 60
    """Of one job; a run that needs longer is requeued before it ends."""
    signal_lead_s: Annotated[int, msgspec.Meta(ge=10, le=65535)] = 120
    """Seconds before the time limit at which Slurm warns (`--signal=B:USR1@N`); a save must fit into them."""
    cpus_per_node: Positive = 1
    """CPU cores that the job asks for on each node, for all of its ranks."""
    gpus_per_node: NonNegative = 0
    """GPUs that the job asks for on each node: one for each of its ranks (`distributed.dp_size` and
    `distributed.nodes`). 0: none. Of one type: `slurm.extra: {gres: "gpu:a100:8"}` beside it, and that is asked for."""
    mem_mb_per_node: NonNegative = 0
    """0: the partition's default. All memory of the nodes: 0, and `slurm.extra: {mem: 0}`."""
    extra: dict[str, str | int | bool] = {}
    """Further sbatch options by their long names, e.g. {constraint: a100, wckey: my_project}."""
    spare_nodes: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """Nodes that the job holds beyond those that train; it starts with fewer where Slurm has no more. One takes the
    place of a node that is lost, without a requeue (`--no-kill`). Idle until then, and paid for; not of use for the
    first node, which runs the batch script."""
    successor: bool = True
    """If Slurm may not requeue the job (--no-requeue, or the site's rule): queue another job that follows it."""
    expedite: Literal["auto", "never"] = "auto"
    """auto: `--requeue=expedite` where Slurm offers it. After a lost node the job then starts before all others."""
    modules: tuple[str, ...] = ()
    """What each node loads by `module load` before its ranks start, in this order (Lmod or Environment Modules)."""
    python: str | None = None
    """The ranks' Python: a virtual or conda environment, by its directory or by conda's name for it. It needs this
    version of verl-slurm and what the ranks import. null: the environment that submits."""
    setup: tuple[str, ...] = ()
    """Commands that bash runs on each node before its ranks start, after `modules` and `python`. Each is complete by
    itself; one that fails ends the start. The ranks see what they export; the daemon does not."""
    container: ContainerConfig | None = None
    """null: ranks run in the environment that submits."""
