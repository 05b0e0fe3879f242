"""Something about a run that a person should hear, and that stops nothing: a plain value."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Notice", "Topic"]

Topic = Literal["cadence", "storage", "partial", "frozen", "evaluation", "reward", "device"]


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One line for the log and the journal; `loud`: something is wrong."""

    topic: Topic
    text: str
    loud: bool
