"""Shows checkpoints to people: describe, compare."""
