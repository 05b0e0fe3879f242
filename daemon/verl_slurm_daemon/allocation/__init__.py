"""What a lead runs in: a Slurm job, or machines without Slurm."""
