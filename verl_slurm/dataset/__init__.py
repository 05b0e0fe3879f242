"""Reads the data of a run: its rows, and the fingerprint that tells whether it has changed."""
