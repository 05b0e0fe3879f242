"""What a cause means is said in several tables: a new one that a table does not know is found here."""

from typing import get_args

import pytest

from tests.journal.test_goodput import at, life
from verl_slurm.cli.show.story import for_people
from verl_slurm.journal.events import Cause
from verl_slurm.journal.folds.goodput import RunNumbers
from verl_slurm.journal.folds.outages import ENDING_CAUSES
from verl_slurm.slurm.cause import CauseKind

GOES_ON = {"operator", "suspended", "none", "unknown"}
"""The attempt does not end by them: a start after one has lost its lead."""


@pytest.mark.parametrize("kind", get_args(CauseKind))
def test_each_cause_is_known_to_all_who_count_or_tell_it(kind: CauseKind) -> None:
    assert (kind in ENDING_CAUSES) is (kind not in GOES_ON | {"cancel"})
    found = at(5, "cause", cause=kind, evidence="JobState=RUNNING Restarts=0")
    run = RunNumbers([*life(0), at(1, "restart", number=1), found, at(9, "started", job_id="7")])
    run.feed(at(10, "restart", number=2))
    assert (run.restarts["lead_lost"] == 0) is (kind not in GOES_ON), run.restarts
    if kind not in GOES_ON:
        told = for_people(found)
        assert isinstance(told, Cause)
        assert told.evidence != "Slurm says so"
