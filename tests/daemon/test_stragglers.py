"""Which rank is slow, by the seconds that ranks work between safe points."""

import itertools
import statistics

import pytest
from verl_slurm_daemon.decide.rank_pace import StragglerWatch, _median_without
from verl_slurm_daemon.lead.pace_watch import PaceWatch

from tests.builders import run_config
from verl_slurm.journal.events import Notice, kind_of
from verl_slurm.wire.messages import Progress, RankStarted


def play(*phases: tuple[list[float], int], factor: float = 1.5) -> list[tuple[int, bool]]:
    """Each phase: seconds of work of each rank from safe point to safe point, and how many safe points."""
    watch = StragglerWatch(factor, len(phases[0][0]))
    own, passed, news = [0.0] * len(phases[0][0]), 0, []
    for work_s, safe_points in phases:
        for _ in range(safe_points):
            passed += 1
            for rank, seconds in enumerate(work_s):
                own[rank] += seconds
                news += watch.passed(rank, passed, own[rank])
    return [(one.rank, one.slow) for one in news]


EVEN = [10.0, 10.0, 10.0, 10.0]
SLOW = [10.0, 10.0, 20.0, 10.0]


@pytest.mark.parametrize(
    ("phases", "news"),
    [
        ([(EVEN, 100)], []),
        ([([10.0, 12.0, 9.0, 14.0], 100)], []),
        ([(EVEN, 20), (SLOW, 100)], [(2, True)]),  # once
        ([(EVEN, 20), (SLOW, 3), (EVEN, 40), (SLOW, 3), (EVEN, 40)], []),  # one slow window is none
        ([(SLOW, 40), (EVEN, 40), (SLOW, 40)], [(2, True), (2, False), (2, True)]),
        ([([10.0, 20.0], 40)], [(1, True)]),  # of two
        ([(EVEN, 40), ([40.0] * 4, 40)], []),  # what all share
        ([([10.0], 100)], []),  # a single rank
        ([([0.01, 0.01, 0.02, 0.01], 100)], []),  # noise of milliseconds
    ],
)
def test_a_rank_that_stays_slow_is_named_and_told_when_it_is_fast_again(
    phases: list[tuple[list[float], int]], news: list[tuple[int, bool]]
) -> None:
    assert play(*phases) == news
    assert play(*phases, factor=0.0) == []


def test_a_straggler_is_told_by_its_node_when_it_begins_and_ends_and_is_named_meanwhile() -> None:
    pace, own, told = PaceWatch.of(run_config(dp_size=3, nodes=3)), [0.0, 0.0, 0.0], list[Notice]()
    passed = itertools.count(1)
    for rank in range(3):
        pace.hear(f"n{rank}", RankStarted(rank=rank, pid=1))

    def work(*seconds: float) -> None:
        for _, safe_points in zip(range(30), passed, strict=False):
            for rank in range(3):
                own[rank] += seconds[rank]
                told.extend(
                    pace.hear(
                        f"n{rank}",
                        Progress(
                            rank=rank,
                            step=0,
                            phase="generate",
                            index=0,
                            safe_points=safe_points,
                            new_rollouts=0,
                            own_s=own[rank],
                        ),
                    )
                )

    work(1.0, 1.0, 3.0)
    assert pace.stragglers == ["rank 2 on n2"]
    work(1.0, 1.0, 1.0)
    work(1.0, 1.0, 1.0)
    assert pace.stragglers == []
    assert [(kind_of(event), event.topic) for event in told] == [
        ("warning", "straggler"),
        ("notice", "straggler"),
    ]
    words = "rank 2 works 3.0 times as long as the others: 3 s from safe point to safe point, the others 1 s"
    assert told[0].text == f"n2: {words}"


@pytest.mark.parametrize(
    "values", [[1.0, 2.0], [1.0, 1.0, 5.0], [4.0, 1.0, 1.0, 9.0], [3.0, 2.0, 8.0, 8.0, 1.0]]
)
def test_the_others_median_is_that_of_a_plain_count(values: list[float]) -> None:
    for place, own in enumerate(values):
        others = [*values[:place], *values[place + 1 :]]
        assert _median_without(sorted(values), own) == statistics.median(others)


@pytest.mark.timeout(60)
def test_thousands_of_ranks_are_compared_without_a_look_at_all_for_each_report() -> None:
    """Found with 2,000 agents, whose reports kept the lead busy for more than a second each second."""
    work_s = [10.0] * 4096
    work_s[7] = 20.0
    assert play((work_s, 40)) == [(7, True)]
