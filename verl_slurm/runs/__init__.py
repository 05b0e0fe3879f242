"""Finds, lists and follows existing runs, and asks whether they live."""
