"""Every parser of the table stands what it is fed; and the engine finds those that do not."""

import itertools
import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.fuzz import engine
from tests.fuzz.__main__ import main
from tests.fuzz.engine import input_of, run
from tests.fuzz.mutation import MAX_BYTES, mutate_bytes
from tests.fuzz.pool import shares
from tests.fuzz.table import TARGETS
from tests.fuzz.target import Target

pytestmark = pytest.mark.slow

SEED = 20261121
INPUTS = 100_000
SHARES = shares(INPUTS)
ROWS = [pytest.param(t, id=t.name, marks=[pytest.mark.torch] if t.torch else []) for t in TARGETS]


@pytest.mark.parametrize("target", ROWS)
def test_hostile_bytes_are_taken_or_refused_with_the_documented_error(target: Target) -> None:
    outcome = run(target, SEED, range(SHARES[target]))
    assert outcome.inputs == SHARES[target]
    assert not outcome.findings, "\n".join(
        f"{finding.what}\n{finding.trace}\nagain: {finding.command()}" for finding in outcome.findings
    )


@pytest.mark.parametrize("target", ROWS)
def test_what_is_mutated_was_valid(target: Target) -> None:
    for specimen in target.specimens():
        target.parse(specimen if target.seal is None else target.seal(specimen))


def _numbers() -> Target:
    return _target(lambda data: [int(word) for word in data.split()], ValueError)


def _target(parse: Callable[[bytes], object], *raises: type[Exception]) -> Target:
    return Target("test", parse, lambda: [b"1 2 3", b"44 55"], raises=raises)


def test_the_documented_error_is_no_finding_and_an_input_can_be_made_again() -> None:
    outcome = run(_numbers(), 1, range(300))
    assert (outcome.inputs, outcome.findings) == (300, [])
    assert 0 < outcome.taken < 300
    first = [input_of(_numbers(), 1, number) for number in range(300)]
    assert first == [input_of(_numbers(), 1, number) for number in range(300)]
    assert first != [input_of(_numbers(), 2, number) for number in range(300)]


def test_an_undocumented_error_is_found_once_with_the_command_that_shows_it_again() -> None:
    outcome = run(_target(lambda data: data.index(b"2"), KeyError), 7, range(300))
    (finding,) = outcome.findings
    assert "ValueError" in finding.what
    assert finding.command() == f"python -m tests.fuzz --target 'test' --seed 7 --only {finding.number}"
    again = run(
        _target(lambda data: data.index(b"2"), KeyError), 7, range(finding.number, finding.number + 1)
    )
    assert [one.number for one in again.findings] == [finding.number]


def test_a_parser_that_hangs_is_found_even_where_it_catches_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "MAX_SECONDS", 0.01)

    def hang(data: bytes) -> None:
        try:
            for _ in itertools.count():
                time.monotonic()
        except Exception:  # noqa: BLE001
            return

    (finding,) = run(_target(hang, ValueError), 1, range(1)).findings
    assert "CPU time" in finding.what


def test_a_parser_that_hoards_memory_is_found_with_its_input() -> None:
    def hoard(data: bytes) -> None:
        if b"55" in data:
            np.ones(200_000_000, np.uint8)

    outcome = run(_target(hoard), 1, range(64))
    (finding,) = outcome.findings
    assert "MB of memory" in finding.what
    assert b"55" in input_of(_target(hoard), 1, finding.number)


def test_inputs_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    long = b"[" * MAX_BYTES
    assert all(len(mutate_bytes(draw, long, [long])) <= MAX_BYTES for _ in range(50))


def test_the_long_run_says_seed_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "hostfile", "--inputs", "50", "--seed", "5", "--jobs", "1"]) == 0
    assert "50 inputs in " in (said := capsys.readouterr().out)
    assert "seed 5: 0 findings" in said
    assert main(["--target", "hostfile", "--seed", "5", "--only", "3"]) == 0
