"""What the journal says of interruptions: which lost work, and how long the run has lived."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.journals import make_event
from verl_slurm.journal.events import Event
from verl_slurm.journal.folds.interruptions import (
    Interruptions,
    count_interruptions,
    mean_time_between,
)
from verl_slurm.journal.folds.saves import measured_saves

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def event(kind: str, at: float, attempt: int = 1, **fields: Any) -> Event:
    time = (NOON + timedelta(seconds=at)).isoformat(timespec="milliseconds")
    return make_event(kind, time=time, attempt=attempt, **fields)


@pytest.mark.parametrize(
    ("says", "events", "lossy", "run_s"),
    [
        ("nothing has happened", [], 0, 0.0),
        ("it runs since an hour", [event("started", 0), event("verified", 3600)], 0, 3600.0),
        (
            "a preemption with a verified save lost nothing",
            [
                event("started", 0),
                event("cause", 90),
                event("saved", 91),
                event("ended", 100),
                event("started", 500, 2),
                event("saved", 560, 2),
            ],
            0,
            160.0,
        ),
        (
            "one without did",
            [event("started", 0), event("cause", 90), event("degraded", 99), event("ended", 100)],
            1,
            100.0,
        ),
        (
            "every crash of the ranks did",
            [event("started", 0), event("crash", 40), event("crash", 80), event("ended", 100)],
            2,
            100.0,
        ),
        (
            "a start that ended without a word did, until the next start",
            [event("started", 0), event("saved", 60), event("started", 900, 2), event("saved", 910, 2)],
            1,
            70.0,
        ),
        (
            "the one that goes on now has not ended at all",
            [event("started", 0), event("saved", 60)],
            0,
            60.0,
        ),
        (
            "a clock that went back is no time",
            [event("started", 100), event("ended", 40)],
            0,
            0.0,
        ),
        (
            "lines that make no sense are passed over",
            [
                make_event("crash"),
                make_event("started", attempt=1, time="?"),
                event("crash", 0, 9),
            ],
            0,
            0.0,
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_counts(says: str, events: list[Event], lossy: int, run_s: float) -> None:
    expected = Interruptions(lossy=lossy, run_s=run_s)
    assert count_interruptions(events) == expected, says


@pytest.mark.parametrize(
    ("says", "lossy", "hours", "expected_hours"),
    [
        ("nothing seen: what was believed", 0, 0.0, 24.0),
        ("a day without one makes it longer", 0, 24.0, 48.0),
        ("one in a day agrees", 1, 24.0, 24.0),
        ("what is seen outweighs the belief", 999, 976.0, 1.0),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_the_mean_time_between_them(says: str, lossy: int, hours: float, expected_hours: float) -> None:
    seen = Interruptions(lossy=lossy, run_s=hours * 3600)
    assert mean_time_between(seen, 24 * 3600.0) == pytest.approx(expected_hours * 3600), says


def test_measured_saves_are_the_newest_and_only_those_that_make_sense() -> None:
    events = [
        event("saved", at, num_bytes=count, seconds=seconds)
        for at, (count, seconds) in enumerate([(1, 1.0), (2, 0.0), (0, 1.0), (3, None), (4, 2.0), (5, 3.0)])
    ]
    assert measured_saves(events, 9) == [(1, 1.0), (4, 2.0), (5, 3.0)]
    assert measured_saves(events, 2) == [(4, 2.0), (5, 3.0)]
    assert measured_saves(events, 0) == []


def test_what_the_nodes_disks_took_says_nothing_of_shared_storage() -> None:
    events = [
        event("saved", at, num_bytes=9, seconds=float(at), on_shared=on_shared)
        for at, on_shared in ((1, True), (2, False))
    ]
    assert measured_saves(events, 9) == [(9, 1.0)]


kinds = st.sampled_from(["started", "ended", "fenced", "crash", "degraded", "cause", "saved"])


@given(st.lists(st.builds(event, kinds, st.floats(0, 1e6), st.integers(1, 4))))
def test_whatever_the_journal_says_the_mean_is_a_time(events: list[Event]) -> None:
    seen = count_interruptions(events)
    assert seen.lossy >= 0
    assert seen.run_s >= 0.0
    assert mean_time_between(seen, 60.0) > 0.0
