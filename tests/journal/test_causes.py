"""What a cause means is said in one table, and each one has its row."""

from typing import get_args

from verl_slurm.journal.causes import CAUSES, SERIES, CauseKind

GOES_ON = {"operator", "suspended", "none", "unknown"}
"""The attempt does not end by them: a start after one has lost its lead."""


def test_each_cause_is_known_to_all_who_count_or_tell_it() -> None:
    for kind in get_args(CauseKind):
        meaning, ends = CAUSES[kind], kind not in GOES_ON
        facts = (meaning.ended_by != "", meaning.series in SERIES, meaning.goes_on)
        assert facts == (ends, ends, kind != "cancel"), kind
        assert meaning.words or not ends, kind
