"""Rewards: models and Python functions, and replacing one in a running run."""
