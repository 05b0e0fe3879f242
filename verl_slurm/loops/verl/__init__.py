"""Loops of verl and programs on Ray."""
