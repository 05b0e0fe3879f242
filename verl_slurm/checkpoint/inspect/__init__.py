"""Checkpoints for people: describe, compare, export."""
