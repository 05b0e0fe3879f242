"""Sampling: engines, samples, and the ledger that they are written to."""
