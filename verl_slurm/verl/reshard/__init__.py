"""Divides the checkpoints of verl's FSDP engine among another number of ranks, by torch in a process of its own."""
