"""Images that ranks run in: what is mounted, how a runtime is called, which image it is, and what starts inside.

Imports nothing. Reasons: docs/decisions/0019-containers.md.
"""
