"""Helpers for every package: errors, files, paths, processes, keys."""
