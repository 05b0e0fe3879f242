"""A list of checks: who runs which, what is left out after a refusal, and how findings read."""

from verl_slurm.base.errors import ConfigError
from verl_slurm.checks import ANYTHING, Check, Finding, bad, good, run_checks, skipped, told, warn


def refuse(_: int) -> list[Finding]:
    raise ConfigError("no")


def look(subject: int) -> list[Finding]:
    return [good("number", str(subject))]


BOTH = ("submit", "doctor")
CHECKS: list[Check[int]] = [
    Check("wrong", ("submit",), refuse),
    Check("after it", BOTH, look, ("wrong",)),
    Check("of no concern", BOTH, look, ("wrong",), lambda subject: subject > 7),
    Check("by a section", BOTH, look, ("train",)),
    Check("at last", BOTH, look, (ANYTHING,)),
]


def test_what_goes_by_a_refusal_is_left_out_and_named_and_the_rest_is_looked_at() -> None:
    begun: list[str] = []
    results = run_checks(CHECKS, "submit", 7, begins=begun.append)
    assert (begun, list(results.refusals)) == (["wrong", "by a section"], ["wrong"])
    assert (results.left_out, len(results.findings)) == (["after it", "at last"], 1)
    assert run_checks(CHECKS, "submit", 8).left_out == ["after it", "of no concern", "at last"]
    assert run_checks(CHECKS, "doctor", 7, refused=["train"]).left_out == ["by a section", "at last"]
    assert run_checks(CHECKS, "doctor", 7).left_out == run_checks(CHECKS, "node", 7).left_out == []


def test_findings_read_as_one_line_each() -> None:
    findings = [good("a", "b"), warn("c", "d", "e"), skipped("f"), bad("g", "h")]
    assert told(findings) == (["a: b"], ["c: d; e", "not looked at: f", "g: h"])
