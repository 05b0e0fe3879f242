"""What `verl-slurm doctor` and `submit` find out about a cluster: one finding, one line, one remedy."""

from collections.abc import Iterable
from typing import Literal

import msgspec

__all__ = ["Finding", "Verdict", "bad", "good", "warn", "worst"]


Verdict = Literal["good", "warning", "bad"]
"""`bad`: a run would lose work or never start. `warning`: it costs time, or is a choice to know about."""

_ORDER: tuple[Verdict, ...] = ("good", "warning", "bad")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    topic: str
    verdict: Verdict
    found: str
    remedy: str = ""
    """The user's next action, or what verl-slurm does by itself; empty: nothing needs to be done."""


def good(topic: str, found: str, remedy: str = "") -> Finding:
    return Finding(topic=topic, verdict="good", found=found, remedy=remedy)


def warn(topic: str, found: str, remedy: str) -> Finding:
    return Finding(topic=topic, verdict="warning", found=found, remedy=remedy)


def bad(topic: str, found: str, remedy: str) -> Finding:
    return Finding(topic=topic, verdict="bad", found=found, remedy=remedy)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Returns the worst verdict of all; `good` of none."""
    return max((finding.verdict for finding in findings), key=_ORDER.index, default="good")
