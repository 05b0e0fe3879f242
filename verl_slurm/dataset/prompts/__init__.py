"""Data files of all kinds, row by row."""
