"""Connects and authenticates the ranks of a run, below a program's own `init_process_group()`.

Imports nothing: see `install`, `store`, and `__main__`, the program that a rank is started with. Reasons:
docs/decisions/0010-rendezvous.md.
"""
