"""Measures how long a step took and how its time divides."""
