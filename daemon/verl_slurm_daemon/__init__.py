"""The side daemon: one lead a job, one agent a node. No torch, no click, no submitit."""
