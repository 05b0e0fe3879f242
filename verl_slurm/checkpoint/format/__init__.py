"""A checkpoint on disk: the specification, and what reads and writes its parts. No file is opened here."""
