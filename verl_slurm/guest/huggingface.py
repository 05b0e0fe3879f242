"""The former name of `verl_slurm.loops.huggingface`."""

from verl_slurm.loops.huggingface import VerlSlurmCallback

__all__ = ["VerlSlurmCallback"]
