"""Connects lead and agents: the channel and its limits."""
