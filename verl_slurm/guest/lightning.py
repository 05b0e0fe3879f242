"""The former name of `verl_slurm.loops.lightning`."""

from verl_slurm.loops.lightning import ResumableDataLoader, VerlSlurmCheckpoint

__all__ = ["ResumableDataLoader", "VerlSlurmCheckpoint"]
