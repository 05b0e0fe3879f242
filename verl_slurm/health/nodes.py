"""Looks at a node's room and mounts, and judges its clock."""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence

from verl_slurm.health import Finding, bad, good, skipped


def look_at_room(begins: Callable[[str], None], min_free_mb: int) -> list[Finding]:
    """Looks at the node's own temporary directory. A full run directory is no fault of a node."""
    if not min_free_mb:
        return []
    begins("room")
    place = tempfile.gettempdir()
    try:
        free_mb = shutil.disk_usage(place).free >> 20
    except OSError as error:
        return [bad("room", f"{place}: {error.strerror}")]
    said = f"{free_mb} MiB free in {place}"
    if free_mb < min_free_mb:
        # Any user of the node can fill it, and remove the files a moment later.
        return [bad("room", f"{said}, at least {min_free_mb}", passing=True)]
    return [good("room", said)]


def look_at_mounts(begins: Callable[[str], None], places: Sequence[str]) -> list[Finding]:
    """Looks for directories and files that the lead sees. RUN is not among them: an agent that found its lead has
    read the lead's token there."""
    if not places:
        return []
    begins("mounts")
    missing = []
    for place in places:
        try:
            os.stat(place)
        except OSError as error:
            missing.append(f"{place}: {error.strerror}")
    return [bad("mounts", "; ".join(missing)) if missing else good("mounts", ", ".join(places))]


def judge_clock(ahead_s: float | None, most_s: float) -> list[Finding]:
    """Judges a node's clock.

    Args:
        ahead_s: this clock minus Slurm's; None: not known.
    """
    if not most_s:
        return []
    if ahead_s is None:
        return [skipped("clock", "the lead did not tell the time")]
    said = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} Slurm's"
    return [bad("clock", said) if abs(ahead_s) > most_s else good("clock", said)]
