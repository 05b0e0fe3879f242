"""A run that is done, submitted again with more steps, as docs/configuration.md promises."""

import json
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.hostile.measured import Measured, measured
from tests.local_runs import QUICK

pytestmark = pytest.mark.torch


def submit(*words: object) -> Measured:
    done = measured("submit", *words, "--cluster", "local", "--wait")
    assert done.code == 0, done.err + done.out
    return done


@pytest.mark.long
def test_a_run_that_is_done_goes_on_with_more_steps_bit_for_bit(short_dir: Path) -> None:
    config, a, b = ROOT / "configs/quickstart.yaml", short_dir / "a", short_dir / "b"
    submit(config, *QUICK, "train.steps=1", f"run_dir={a}")
    submit(a, "train.steps=2")
    submit(config, *QUICK, f"run_dir={b}")
    assert json.loads(measured("status", a, "--json").out)["step"] == 2
    done = measured("inspect", a, b, "--bits")
    assert done.code == 0, done.out + done.err
