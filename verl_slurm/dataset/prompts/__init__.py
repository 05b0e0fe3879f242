"""Reads data files of all kinds, row by row."""
