"""Checks before and during a run: the form of a check and of its findings, and how a list of checks is run.

A wrong thing is refused by `submit`, listed by `doctor`, and has a node left by the node's agent.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode

Verdict = Literal["not checked", "good", "warning", "bad"]
"""`bad`: a run would lose work or never start. `warning`: it costs time, or is a choice to know about."""
_ORDER: tuple[Verdict, ...] = get_args(Verdict)
When = Literal["submit", "doctor", "node"]
"""Who runs a check. Submit and doctor run it on the machine of the user, an agent on its node before ranks start."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check: one line, for people."""

    topic: str
    verdict: Verdict
    found: str = ""
    remedy: str = ""
    """The user's next action, or what verl-slurm does by itself; empty: nothing needs to be done."""
    passing: bool = False
    """Of what is bad: it may pass by itself, and another user may have caused it."""

    @property
    def text(self) -> str:
        """Returns it without its remedy."""
        return ": ".join(filter(None, (self.topic, self.found)))

    @property
    def line(self) -> str:
        """Returns all of it as one line."""
        return "; ".join(filter(None, (self.text, self.remedy)))


def good(topic: str, found: str = "", remedy: str = "") -> Finding:
    return Finding(topic, "good", found, remedy)


def warn(topic: str, found: str = "", remedy: str = "") -> Finding:
    return Finding(topic, "warning", found, remedy)


def bad(topic: str, found: str, remedy: str = "", *, passing: bool = False) -> Finding:
    return Finding(topic, "bad", found, remedy, passing)


def skipped(topic: str, why: str = "") -> Finding:
    """It could not be looked at, which says nothing against it."""
    return Finding(topic, "not checked", why)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Returns the worst verdict of all; `good` of none."""
    return max((finding.verdict for finding in findings), key=_ORDER.index, default="good")


def told(findings: Iterable[Finding]) -> tuple[list[str], list[str]]:
    """Returns lines for what is good, and for what the user should know besides."""
    good_lines, notes = list[str](), list[str]()
    for finding in findings:
        if finding.verdict == "good":
            good_lines.append(finding.line)
        else:
            notes.append(f"{'not looked at: ' if finding.verdict == 'not checked' else ''}{finding.line}")
    return good_lines, notes


S = TypeVar("S")
ANYTHING = "anything"
"""In `Check.goes_by`: the check is left out where anything was refused before it."""


def _always(_: object) -> bool:
    return True


@dataclass(frozen=True)
class Check(Generic[S]):
    """One check of a list.

    Attributes:
        name: what it looks at, in plain words.
        look: looks at it, and judges; raises a VerlSlurmError to refuse.
        goes_by: names of checks before it, and sections of the configuration. It is left out where one was refused.
        concerns: whether it looks at something of this run. It is asked also where the check is left out.
    """

    name: str
    when: Collection[When]
    look: Callable[[S], Iterable[Finding]]
    goes_by: tuple[str, ...] = ()
    concerns: Callable[[S], bool] = _always


class CheckResults(NamedTuple):
    """What a list of checks came to."""

    findings: list[Finding]
    refusals: dict[str, VerlSlurmError]
    """By the check."""
    left_out: list[str]
    """Checks that would have looked at something, and go by what is refused."""


def run_checks(
    checks: Sequence[Check[S]],
    when: When,
    subject: S,
    *,
    refused: Collection[str] = (),
    begins: Callable[[str], None] = lambda _: None,
) -> CheckResults:
    """Runs the checks of a list, in its order, on `subject`.

    Args:
        refused: sections of the configuration that are wrong.
        begins: told the name of each check before it.
    """
    results, gone = CheckResults([], {}, []), {*refused, *([ANYTHING] if refused else [])}
    for check in checks:
        if when not in check.when or not check.concerns(subject):
            continue
        if not gone.isdisjoint(check.goes_by):
            results.left_out.append(check.name)
            continue
        begins(check.name)
        try:
            results.findings.extend(check.look(subject))
        except VerlSlurmError as error:
            results.refusals[check.name] = error
            gone |= {check.name, ANYTHING}
    return results


class WrongProduct(VerlSlurmError):
    """A rank's device multiplies wrongly. That of another node may not."""

    exit_code = ExitCode.INTERNAL
