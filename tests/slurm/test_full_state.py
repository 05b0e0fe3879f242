from pathlib import Path

import pytest

from verl_slurm.slurm.parse import ended_as

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("moment", "end"),
    [
        ("23.02.8/cancel_mode_6_completing", None),  # one word, which says no more than the text
        ("23.11.11/cancel_mode_6_completing", "PREEMPTED"),
        ("23.11.11/scancel_in_grace_completing", "CANCELLED"),
        ("newer/25.11_requeued_completing", None),
    ],
)
def test_the_end_is_told_where_slurm_tells_it(moment: str, end: str | None) -> None:
    assert ended_as((GOLDEN / f"{moment}.json").read_text(), 1) == end


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "scontrol: unrecognized option '--json'",
        '{"jobs": [{"job_id": 2, "job_state": ["PREEMPTED"]}]}',
        '{"jobs": [{"job_id": 1, "job_state": ["PREEMPTED", "CANCELLED"]}]}',
        '{"jobs": [{"job_id": 1, "job_state": ["PREEMPTED"]}, {"job_id": 1, "job_state": ["CANCELLED"]}]}',
        '{"jobs": [{"job_id": {"set": true, "number": 1}, "job_state": ["PREEMPTED"]}]}',
        '{"jobs": [{"job_id": 1, "job_state": {"current": ["PREEMPTED"]}}]}',
        "[" * 100_000,
    ],
)
def test_what_is_not_understood_says_nothing(text: str) -> None:
    assert ended_as(text, 1) is None
