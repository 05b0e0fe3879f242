"""The events of the nodes of a job, in the manner of `events.py`."""

from verl_slurm.journal.event import Event


class NodesChosen(Event):
    """Among more nodes than the ranks need, those that got them, and those that are spare."""

    train: list[str] = []
    """In the order of their ranks."""
    spare: list[str] = []


class Avoid(Event):
    """The job stays away from nodes that failed it: `nodes` are new, `detail` says what Slurm was told."""

    nodes: list[str] = []
    detail: str = ""
    told: list[str] = []
    """All nodes that Slurm excludes by our word: other ones in its list are the user's or an operator's."""


class Link(Event):
    """The connection to an agent broke."""

    node: str = ""
    error: str = ""
