"""What every event of the journal has. `events.py` has the kinds, and specifies the file."""

from datetime import datetime
from typing import Annotated, ClassVar

import msgspec

Int = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
"""JSON allows integers that no float can hold; one of those is none of ours."""


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event", tag=_snake):
    """What every kind of event has."""

    loud: ClassVar[bool] = False
    """Something is wrong: the lead's log marks the line."""

    time: str = ""
    """When it was written: UTC, ISO 8601, milliseconds. The host's clock."""
    attempt: Int | None = None
    """The attempt (one start of the Slurm job) that wrote it; None: a person's command did."""
    job_id: str | None = None
    """The job that it is about."""

    @property
    def at(self) -> float | None:
        """`time` in seconds since 1970; None: it is no time."""
        try:
            return datetime.fromisoformat(self.time).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
