"""The events of services (`services` in the configuration), in the manner of `events.py`."""

from typing import ClassVar

from verl_slurm.journal.event import Event, Int


class ServiceStarted(Event):
    """A service of the configuration was started on a node."""

    service: str
    node: str = ""
    address: str = ""
    """`host:port`, where the ranks find it."""


class ServiceReady(Event):
    """A service answered its probe, so many seconds after its start."""

    service: str
    node: str = ""
    address: str = ""
    seconds: float = 0.0


class ServiceEnded(Event):
    """A service ended, or no longer answered its probe. It is started again, for the `restarts`-th time in a row."""

    loud: ClassVar[bool] = True
    service: str
    node: str = ""
    detail: str = ""
    restarts: Int = 0
    budget: Int = 0


class ServiceFailed(Event):
    """A service is not started again. If it is `needed`, the run cannot go on in this job."""

    loud: ClassVar[bool] = True
    service: str
    node: str = ""
    detail: str = ""
    needed: bool = True
