"""Checks before a job is queued. Each check refuses with one clear error."""
