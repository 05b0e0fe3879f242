"""Formats one line of the lead's and the agents' logs: time, writer, event, facts. Pure except for the clocks."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

__all__ = ["log_line", "now"]

_MAX_VALUE = 300
"""Maximum characters of one fact; the journal or the ranks' own log has the rest."""


def now() -> str:
    """UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def log_line(who: str, event: str, fields: Mapping[str, Any], *, loud: bool = False) -> str:
    """Formats `TIME +MONOTONIC verl-slurm[WHO] EVENT key=value ...`, always one line.

    The second field is CLOCK_MONOTONIC of this machine in seconds. Nodes disagree about dates, and dates are
    set while a run goes on. The monotonic value still gives durations, and the order of events on one node.

    Args:
        who: the epoch; for an agent also its node.
        loud: something is wrong.
    """
    told = " ".join(f"{key}={_short(value)}" for key, value in fields.items() if value is not None)
    when = f"{now()} +{time.monotonic():.3f}"
    line = f"{when} verl-slurm[{who}] {'!! ' if loud else ''}{event:<10} {told}".rstrip()
    return _plain(line) + "\n"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = _plain(text)[:_MAX_VALUE]
    # Quotes are escaped: what follows an unescaped one would read as a fact of ours.
    quote = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quote}"' if " " in text else text


def _plain(text: str) -> str:
    """Replaces line breaks, so that no host name or error message starts a second line."""
    return "".join(c if c.isprintable() else " " for c in text)
