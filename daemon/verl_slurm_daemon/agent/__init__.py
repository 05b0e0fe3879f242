"""The agent: one per node, parent of its ranks."""
