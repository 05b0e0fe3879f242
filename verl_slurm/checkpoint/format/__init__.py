"""Specifies a checkpoint on disk, and reads and writes its parts. Opens no file."""
