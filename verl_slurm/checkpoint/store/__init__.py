"""Keeps checkpoints as files: commit, verify, list, set aside, prune, scrub."""
