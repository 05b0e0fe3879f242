"""What `verl-slurm requeue` says of a job that cannot be requeued now; what it does: test_submit_slurm.py."""

from pathlib import Path

import msgspec
import pytest

from verl_slurm.cli.jobs import way_on
from verl_slurm.slurm.parse import parse_job

GOLDEN = Path(__file__).parent.parent / "slurm" / "golden"


@pytest.mark.parametrize(
    ("moment", "reason", "way"),
    [
        ("suspended", None, "scontrol resume 1"),
        ("pending", "job_requeued_in_held_state", "scontrol release 1"),
        ("pending", "JobHeldUser", "scontrol release 1"),
        ("pending", "JobHeldAdmin", "scontrol release 1"),
        ("pending", "Resources", ""),
        ("running", None, ""),
    ],
)
def test_a_job_that_stands_still_has_a_way_on(moment: str, reason: str | None, way: str) -> None:
    facts = parse_job((GOLDEN / f"{moment}.txt").read_text(), 1)
    assert way_on(msgspec.structs.replace(facts, reason=reason)) == way
