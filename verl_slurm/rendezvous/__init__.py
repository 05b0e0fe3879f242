"""How the ranks of a run find each other and know each other, below a program's own `init_process_group()`.

Imports nothing: see `install`, `store`, `peers`, and `__main__`, the program that a rank is started with.
Why: docs/decisions/0010-rendezvous.md.
"""
