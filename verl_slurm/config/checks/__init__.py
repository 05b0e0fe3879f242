"""The checks of the configuration, one module per section."""

from typing import NamedTuple

__all__ = ["Complaint"]


class Complaint(NamedTuple):
    """Names a key, its value, the expected value and the remedy."""

    key: str
    found: str
    expected: str
    remedy: str
