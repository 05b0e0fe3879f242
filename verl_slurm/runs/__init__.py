"""Existing runs: find, list, follow, and ask whether they live."""
