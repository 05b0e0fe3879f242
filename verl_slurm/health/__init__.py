"""Whether a node is fit for ranks, and which nodes were not."""

from typing import Literal

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode

__all__ = ["Checked", "WrongProduct", "bad", "good", "skipped"]


class Checked(msgspec.Struct, frozen=True):
    """The result of one check of one node."""

    check: str
    verdict: Literal["good", "bad", "not checked"]
    found: str
    """For people, in one line."""


def good(check: str, found: str) -> Checked:
    return Checked(check, "good", found)


def bad(check: str, found: str) -> Checked:
    return Checked(check, "bad", found)


def skipped(check: str, why: str) -> Checked:
    """The node could not be looked at, which says nothing against it."""
    return Checked(check, "not checked", why)


class WrongProduct(VerlSlurmError):
    """A rank's device multiplies wrongly. That of another node may not."""

    exit_code = ExitCode.INTERNAL
