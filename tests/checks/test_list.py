"""A list of checks: who runs which, what is left out after a refusal, and how findings read."""

import os
import subprocess
import sys

from tests.processes import python_path
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


def test_a_probe_is_spoken_to_in_utf_8_whatever_the_locale() -> None:
    echo = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    code = (
        "import sys; from verl_slurm.checks.probe_command import run_to_end;"
        f"print(ascii(run_to_end([sys.executable, '-c', {echo!r}], 60, text='\\uff5cUser').out))"
    )
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | python_path() | plain,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == ascii("\uff5cUser"), done.stderr
