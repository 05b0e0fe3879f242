"""What `verl-slurm doctor` and `submit` find out about a cluster: one finding, one line, one remedy."""
