"""The side daemon: one lead per job, one agent per node. It imports no torch, click or submitit."""
