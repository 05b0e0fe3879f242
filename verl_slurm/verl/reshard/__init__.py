"""Divides the checkpoints of verl's FSDP engine among another number of ranks, without torch."""
