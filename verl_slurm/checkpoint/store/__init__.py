"""Checkpoints as files: commit, verify, list, set aside, prune, scrub."""
