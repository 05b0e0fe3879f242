"""One line of the lead's and the agents' logs: when, whose, what, and the facts. Pure but for the clocks."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

__all__ = ["log_line", "now"]

_MAX_VALUE = 300
"""Characters of one fact; the rest of a long story is in the journal or in the ranks' own log."""


def now() -> str:
    """UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def log_line(who: str, event: str, fields: Mapping[str, Any], *, loud: bool = False) -> str:
    """`TIME +MONOTONIC verl-slurm[WHO] EVENT key=value ...`, always one line.

    The second one is CLOCK_MONOTONIC of this machine in seconds: nodes disagree about dates, and dates are set in
    mid-run; how long something took, and what came first on one node, it says all the same.

    Args:
        who: the attempt's number, for an agent also its node.
        loud: something is wrong.
    """
    told = " ".join(f"{key}={_short(value)}" for key, value in fields.items() if value is not None)
    when = f"{now()} +{time.monotonic():.3f}"
    line = f"{when} verl-slurm[{who}] {'!! ' if loud else ''}{event:<10} {told}".rstrip()
    return _plain(line) + "\n"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = _plain(text)[:_MAX_VALUE]
    # A quote in it must not end it: what follows would read as a fact of ours.
    quote = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quote}"' if " " in text else text


def _plain(text: str) -> str:
    """One line, whatever a host or an error is called."""
    return "".join(c if c.isprintable() else " " for c in text)
