"""What a cause means is said in one table, and each one has its row."""

from typing import get_args

import pytest

from verl_slurm.journal.causes import CAUSES, SERIES, CauseKind

GOES_ON = {"operator", "suspended", "none", "unknown"}
"""The attempt does not end by them: a start after one has lost its lead."""


@pytest.mark.parametrize("kind", get_args(CauseKind))
def test_each_cause_is_known_to_all_who_count_or_tell_it(kind: CauseKind) -> None:
    meaning = CAUSES[kind]
    ends = kind not in GOES_ON
    assert (meaning.ended_by != "", meaning.series in SERIES, meaning.goes_on) == (
        ends,
        ends,
        kind != "cancel",
    )
    assert meaning.words or not ends
