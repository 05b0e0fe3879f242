"""Defines a message about a run for people that stops nothing: a plain value."""

from dataclasses import dataclass

from verl_slurm.wire.messages import Topic


@dataclass(frozen=True, kw_only=True)
class LoudNotice:
    """One line for the log and the journal; `loud`: something is wrong."""

    topic: Topic
    text: str
    loud: bool
