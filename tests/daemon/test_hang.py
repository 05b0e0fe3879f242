"""When silence is a hang: by the run's own pace, never before the floor."""

import asyncio
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from verl_slurm_daemon.decide.rank_pace import HangWatch
from verl_slurm_daemon.lead import pace_watch as module
from verl_slurm_daemon.lead.pace_watch import PaceWatch

from verl_slurm.config.schema import DaemonConfig
from verl_slurm.wire.messages import Progress, RankStarted, SaveStarted


def watch(*moves: tuple[Any, ...]) -> HangWatch:
    """Each move: what a rank did, the rank, its safe points where it passed one, and when."""
    hang = HangWatch(factor=5.0, floor_s=60.0, load_s=900.0)
    for what, rank, *more in moves:
        getattr(hang, what)(int(rank), *more)
    return hang


# Its loop begins; a step takes 400 s, more than the floor.
LOOP = (("started", 0, 0.0), ("passed", 0, 0, 30.0))


@pytest.mark.parametrize(
    ("moves", "hung_at"),
    [
        pytest.param([("started", 0, 0.0)], 900.0, id="loading has a limit of its own"),
        pytest.param(
            [("passed", 0, n + 1, float(n)) for n in range(3)], 62.0, id="a fast run gets the floor"
        ),
        pytest.param(
            [("passed", 0, n, at) for n, at in enumerate((0.0, 40.0, 45.0), 1)],
            245.0,
            id="a slow run a multiple",
        ),
        pytest.param(
            [("started", 0, 0.0), ("passed", 0, 1, 600.0)],
            660.0,
            id="loading is no pace: the first safe point",
        ),
        pytest.param(LOOP, 930.0, id="one safe point a step"),
        pytest.param([*LOOP, ("passed", 0, 1, 430.0)], 2430.0, id="the_second_step_of_such_a_loop"),
        pytest.param(
            [("passed", 0, 1, 0.0), *(("passed", 0, 2, 10.0 * n) for n in range(1, 31))],
            360.0,
            id="an evaluation that tells of its batches",
        ),
        pytest.param(
            [("passed", 0, 9, 0.0), ("passed", 1, 9, 0.0), ("finished", 0, 10.0)], 60.0, id="one is done"
        ),
    ],
)
def test_silence_is_a_hang_by_the_runs_own_pace_and_never_before_the_floor(
    moves: list[tuple[Any, ...]], hung_at: float
) -> None:
    hang = watch(*moves)
    assert hang.silence(hung_at - 1.0) is None
    assert hang.next_look_s(hung_at - 10.0) == 10.0
    silence = hang.silence(hung_at)
    assert silence is not None
    assert silence.ranks == (1 if "finished" in {move[0] for move in moves} else 0,)


@pytest.mark.parametrize(
    ("moves", "limit"),
    [
        pytest.param([("started", 0, 0.0)], "900 s: daemon.load_timeout_s", id="loading"),
        pytest.param([("passed", 0, 1, 0.0)], "60 s: daemon.hang_floor_s", id="a step"),
        pytest.param([("passed", 0, 1, 0.0), ("saves", 0, 1.0)], "900 s: daemon.load_timeout_s", id="a save"),
        pytest.param(
            [("passed", 0, 1, 0.0), ("passed", 0, 2, 300.0), ("saves", 0, 301.0)],
            "1500 s: daemon.hang_floor_s",
            id="a save of a run whose steps are longer",
        ),
    ],
)
def test_a_hang_names_the_key_of_its_limit(moves: list[tuple[Any, ...]], limit: str) -> None:
    silence = watch(*moves).silence(10_000.0)
    assert silence is not None
    assert f"limit {limit})" in silence.words


def test_nobody_hangs_who_has_not_spoken_and_one_that_loads_may_train_by_the_next_look() -> None:
    assert watch().silence(10_000.0) is None
    assert watch().next_look_s(10_000.0) == 60.0
    hang = watch(("started", 0, 0.0))
    assert hang.next_look_s(0.0) == 60.0  # not 900
    silence = hang.silence(900.0)
    assert silence is not None
    assert "none before, limit 900 s" in silence.words


@pytest.mark.parametrize("speaks", [False, True])
def test_loading_for_too_long_names_its_key_and_of_a_program_without_a_word_what_it_has_to_call(
    speaks: bool,
) -> None:
    said = [("started", 0, 500.0)] if speaks else []
    silence = watch(("started", 0, 0.0, False), ("started", 1, 0.0, False), *said).silence(1400.0)
    assert silence is not None
    assert "limit 900 s: daemon.load_timeout_s" in silence.words
    assert ("the program has not called verl_slurm.run, VerlSlurmCallback" in silence.words) is not speaks


def test_the_rank_that_is_behind_is_named_and_where_all_stand_alike_none() -> None:
    behind = watch(
        *(("passed", rank, 7, 0.0) for rank in range(4)), *(("passed", n, 8, 1.0) for n in (0, 1, 3))
    )
    silence = behind.silence(60.0)
    assert silence is not None
    assert (silence.ranks, silence.safe_points, silence.foremost) == ((2,), 7, 8)
    assert silence.words.startswith("rank 2 has passed no safe point for 60 s")
    silence = watch(*(("passed", rank, 7, rank / 10) for rank in range(10))).silence(60.5)
    assert silence is not None
    assert silence.ranks == tuple(range(10))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... have passed" in silence.words
    assert "the stacks tell" in silence.words


def test_processes_of_ranks_that_are_all_done_have_to_end() -> None:
    hang = watch(("passed", 0, 9, 0.0), ("finished", 0, 10.0), ("passed", 1, 9, 0.0), ("finished", 1, 10.0))
    assert hang.silence(69.0) is None
    silence = hang.silence(70.0)
    assert silence is not None
    assert (
        silence.words
        == "all ranks have been done for 60 s (daemon.hang_floor_s), and their processes do not end"
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 50.0)), max_size=30))
def test_whoever_passes_a_safe_point_within_the_floor_is_never_called_hung(
    moves: list[tuple[int, float]],
) -> None:
    hang, now, counts, last = watch(), 0.0, dict.fromkeys(range(4), 1), dict.fromkeys(range(4), 0.0)
    for rank in range(4):
        hang.passed(rank, 1, 0.0)
    for rank, pause in moves:
        now += pause
        if max(now - at for at in last.values()) >= 60.0:
            return
        assert hang.silence(now) is None
        counts[rank], last[rank] = counts[rank] + 1, now
        hang.passed(rank, counts[rank], now)


def test_a_save_that_training_waits_for_has_the_patience_of_loading_and_is_no_pace() -> None:
    hang = watch(("passed", 0, 1, 0.0), ("passed", 0, 2, 1.0), ("saves", 0, 2.0))
    assert hang.silence(2.0 + 899.0) is None  # the last save of a run, on slow storage
    assert hang.silence(2.0 + 900.0) is not None
    hang.passed(0, 3, 500.0)
    assert hang.limit_s(0) == 60.0
    heard = PaceWatch(DaemonConfig(hang_floor_s=60.0, load_timeout_s=900.0), lambda: 0.0)
    heard.hear("n1", progress(1))
    heard.hear("n1", SaveStarted(rank=0, request_id=0, step=1, safe_point=0))
    assert heard._hang.limit_s(0) == 900.0


def progress(safe_points: int) -> Progress:
    return Progress(rank=0, step=0, phase="generate", index=0, safe_points=safe_points, new_rollouts=0)


class Stops:
    """A clock of a lead that sleeps as it means to, but for the naps given."""

    def __init__(self, *naps: float) -> None:
        self.now, self.naps, self.slept = 0.0, list(naps), 0

    async def sleep(self, seconds: float) -> None:
        self.slept += 1
        assert self.slept < 10_000
        self.now += seconds + (self.naps.pop(0) if self.naps else 0.0)


def hung_after(pace: PaceWatch, stops: Stops, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(module.asyncio, "sleep", stops.sleep)
    asyncio.run(pace.hang())
    return stops.now


def test_a_suspended_job_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DaemonConfig(hang_floor_s=60.0)
    awake, suspended = Stops(), Stops(0.0, 3600.0, 0.0, 30.0)
    ends = []
    for stops in (awake, suspended):
        pace = PaceWatch(config, lambda stops=stops: stops.now)  # type: ignore[misc]
        pace.hear("n1", RankStarted(rank=0, pid=1))
        pace.hear("n1", progress(1))
        ends.append(hung_after(pace, stops, monkeypatch))
    assert ends == [60.0, 60.0 + 3630.0]


def test_what_a_rank_says_right_after_a_stop_makes_no_pace_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = Stops(3600.0)
    pace = PaceWatch(DaemonConfig(hang_floor_s=60.0), lambda: stops.now)
    pace.hear("n1", progress(1))

    async def told_first(seconds: float) -> None:
        await Stops.sleep(stops, seconds)
        if stops.slept == 1:
            pace.hear("n1", progress(2))

    monkeypatch.setattr(module.asyncio, "sleep", told_first)
    node, words = asyncio.run(pace.hang())
    assert node == ""
    assert "limit 60 s" in words
