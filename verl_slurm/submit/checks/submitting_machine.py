"""Says what the machine and the shell that submit have and the job's nodes may not have, or get without being asked."""

import math
import os
import resource
from collections.abc import Mapping
from pathlib import Path

from verl_slurm.base.mounts import file_system
from verl_slurm.config.schema import BUILTIN, RunConfig
from verl_slurm.slurm.batch import unwanted_environment

# File systems of one machine. Some are exported to others, which a look at this machine cannot tell.
_OF_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_OF_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"}
# Slurm's name, the resource, the option of `ulimit`, and what a run needs at least.
_LIMITS = (
    ("CPU", resource.RLIMIT_CPU, "-t", math.inf),
    ("FSIZE", resource.RLIMIT_FSIZE, "-f", math.inf),
    ("AS", resource.RLIMIT_AS, "-v", math.inf),
    ("DATA", resource.RLIMIT_DATA, "-d", math.inf),
    ("NOFILE", resource.RLIMIT_NOFILE, "-n", 1024),
    ("NPROC", resource.RLIMIT_NPROC, "-u", 1024),
)
# GPUs of several nodes exchange by memory that is locked (InfiniBand, RoCE).
_OF_SEVERAL = (("MEMLOCK", resource.RLIMIT_MEMLOCK, "-l", math.inf),)


def shell_notes(config: RunConfig, conf: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Returns notes about what comes, or does not come, with the shell that submits to Slurm.

    Args:
        conf: `scontrol show config`.
    """
    notes = []
    if found := [
        name for name in unwanted_environment(sorted(environ), config) if name.startswith("SBATCH_")
    ]:
        notes.append(f"{', '.join(found)}: not handed on to sbatch; the configuration decides (slurm.extra)")
    # Slurm gives a job the soft limits of the shell, unless the site or the option says otherwise.
    said = str(config.slurm.extra.get("propagate", conf.get("PropagateResourceLimits", "ALL"))).upper()
    kept = conf.get("PropagateResourceLimitsExcept", "").upper().split(",") if said == "ALL" else []
    several = config.slurm.gpus_per_node > 0 and config.distributed.nodes > 1
    low = [
        f"{name} {soft} (ulimit {option})"
        for name, kind, option, least in _LIMITS + (_OF_SEVERAL if several else ())
        if (said == "ALL" or name in said.split(",")) and name not in kept and "ALL" not in kept
        if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY and soft < least
    ]
    if low:
        notes.append(
            f"limits of this shell come with the job: {', '.join(low)}; "
            "raise them before you submit, or set slurm.extra={propagate: NONE}"
        )
    return notes


def place_notes(config: RunConfig, conf: Mapping[str, str]) -> list[str]:
    """Returns notes about paths that the job's nodes may not see as this machine does.

    Args:
        conf: `scontrol show config`.
    """
    places = {"run_dir": config.run_dir}
    if not config.trainer.is_guest:
        places |= {"model.path": config.model.path, "data.root": config.data.root}
    # A controller at a loopback address serves this machine alone, and so do its nodes.
    hosts = [value for key, value in conf.items() if key.startswith("SlurmctldHost")]
    alone = any("127.0.0." in host or "localhost" in host for host in hosts)
    notes = []
    for key, text in places.items():
        path = Path(os.path.realpath(text))
        kind = "" if alone or text.startswith(BUILTIN) else file_system(_nearest(path))
        if "tmpfs" in conf.get("JobContainerType", "") and path.is_relative_to("/tmp"):  # noqa: S108
            notes.append(
                f"{key}: each job has a /tmp of its own here (JobContainerType): it may not see {text}"
            )
        elif kind in _OF_MEMORY:
            notes.append(
                f"{key}: {text} lies in the memory of this machine ({kind}): the job's nodes do not see it"
            )
        elif kind in _OF_DISKS:
            notes.append(
                f"not looked at: whether the job's nodes see {key} {text}, which is on a disk of this machine ({kind})"
            )
    return notes


def _nearest(path: Path) -> Path:
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


def machine_notes(config: RunConfig, conf: Mapping[str, str]) -> list[str]:
    """Returns the notes of both kinds, for a job that goes to Slurm."""
    return [*shell_notes(config, conf, os.environ), *place_notes(config, conf)]
