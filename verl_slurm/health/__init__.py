"""Whether a node is fit for ranks, and which nodes were not; and the form of a finding, here and in `doctor`."""

from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode

__all__ = ["Finding", "Verdict", "WrongProduct", "bad", "good", "skipped", "warn", "worst"]

Verdict = Literal["not checked", "good", "warning", "bad"]
"""`bad`: a run would lose work or never start. `warning`: it costs time, or is a choice to know about. The better
first."""
_ORDER: tuple[Verdict, ...] = get_args(Verdict)


class Finding(msgspec.Struct, frozen=True):
    """The result of one check: one line, for people."""

    topic: str
    verdict: Verdict
    found: str
    remedy: str = ""
    """The user's next action, or what verl-slurm does by itself; empty: nothing needs to be done."""
    passing: bool = False
    """Of what is bad: it may pass by itself, and another user may have caused it."""


def good(topic: str, found: str, remedy: str = "") -> Finding:
    return Finding(topic, "good", found, remedy)


def warn(topic: str, found: str, remedy: str) -> Finding:
    return Finding(topic, "warning", found, remedy)


def bad(topic: str, found: str, remedy: str = "", *, passing: bool = False) -> Finding:
    return Finding(topic, "bad", found, remedy, passing)


def skipped(topic: str, why: str) -> Finding:
    """It could not be looked at, which says nothing against it."""
    return Finding(topic, "not checked", why)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Returns the worst verdict of all; `good` of none."""
    return max((finding.verdict for finding in findings), key=_ORDER.index, default="good")


class WrongProduct(VerlSlurmError):
    """A rank's device multiplies wrongly. That of another node may not."""

    exit_code = ExitCode.INTERNAL
