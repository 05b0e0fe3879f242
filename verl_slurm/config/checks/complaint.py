"""Defines one complaint about a config, as a value that each section's checks can make."""

from typing import NamedTuple

__all__ = ["Complaint"]


class Complaint(NamedTuple):
    """Names a key, its value, the expected value and the remedy."""

    key: str
    found: str
    expected: str
    remedy: str
