"""One thing that does not fit in a config: a value of its own, so that each section's checks can make it."""

from typing import NamedTuple

__all__ = ["Complaint"]


class Complaint(NamedTuple):
    """Which key, what it has, what it should have, what to do."""

    key: str
    found: str
    expected: str
    remedy: str
