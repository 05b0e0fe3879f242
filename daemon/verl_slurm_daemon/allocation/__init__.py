"""The lead's environment: a Slurm job, or machines without Slurm."""
