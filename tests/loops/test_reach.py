"""Whether the end of a step is worth waiting for, and a request in its middle answered then where it is not."""

import pytest

from tests.fakes.daemon import Daemon
from verl_slurm.loops.reach import reach
from verl_slurm.loops.session import Session
from verl_slurm.loops.step_end import ReachWatch
from verl_slurm.wire.messages import RankSaveFailed, SaveRequest

RECENT = [10.0, 10.0, 50.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("seconds_left", "running_s", "steps_s", "save_s", "ok", "reason"),
    [
        pytest.param(None, 1e9, [600.0], 60.0, True, "there is no deadline", id="no-deadline"),
        pytest.param(20.0, 3.0, [], None, True, "no step was measured", id="never-measured"),
        pytest.param(45.0, 0.0, RECENT, None, False, "steps take up to 50.0 s", id="longest-of-the-last"),
        pytest.param(45.0, 0.0, [50.0, *[10.0] * 5], None, True, "up to 10.0 s", id="older-do-not-count"),
        pytest.param(40.0, 8.0, [10.0], 20.0, True, "33 s needed, 40 s left", id="with-its-save"),
        pytest.param(
            30.0,
            8.0,
            [10.0],
            20.0,
            False,
            "steps take up to 10.0 s, this one runs for 8.0 s, a save takes 20.0 s: 33 s needed, 30 s left",
            id="no-time-for-the-save",
        ),
        pytest.param(1.0, 100.0, [10.0], None, True, "100.0 s", id="overdue-may-end-at-any-moment"),
        pytest.param(20.0, 0.0, [], 30.0, False, "a save takes about 45 s", id="save-alone-too-long"),
        pytest.param(-1.0, 0.0, [], None, False, "the deadline is over", id="over"),
    ],
)
def test_the_end_of_a_step_is_reached_or_not(
    seconds_left: float | None,
    running_s: float,
    steps_s: list[float],
    save_s: float | None,
    ok: bool,
    reason: str,
) -> None:
    found = reach(seconds_left=seconds_left, running_s=running_s, steps_s=steps_s, save_s=save_s)
    assert (found.ok, reason in found.reason) == (ok, True), found.reason


class Watched:
    """A loop in its third step; the first two took `step_s`."""

    def __init__(self, step_s: float, **options: object) -> None:
        now, self.line = [0.0], Daemon()
        session = Session(self.line, rank=0, world_size=1, clock=lambda: now[0])
        session.started()
        for step in (1, 2):
            now[0] += step_s
            session.step_done(step)
        self.watch = ReachWatch(session, **options)  # type: ignore[arg-type]

    def look(self, request_id: int = 1, *, stop: bool = True, left: float = 30.0) -> list[int]:
        """The requests that were given up by now."""
        self.line.asked = SaveRequest(request_id=request_id, stop=stop, seconds_left=left)
        self.watch.look()
        return [failure.request_id for failure in self.line.heard(RankSaveFailed)]


def test_a_step_of_minutes_and_a_grace_of_seconds_is_given_up_once_and_at_once() -> None:
    loop = Watched(300.0)
    loop.watch.look()
    assert loop.line.heard(RankSaveFailed) == []
    assert loop.look() == loop.look() == [1]
    [failure] = loop.line.heard(RankSaveFailed)
    assert "cannot be reached: steps take up to 300.0 s" in failure.reason


def test_a_request_whose_end_comes_in_time_or_that_an_operator_made_is_left_to_the_loop() -> None:
    assert Watched(3.0).look() == []
    assert Watched(300.0).look(stop=False) == []


def test_each_request_is_judged_by_its_own_deadline() -> None:
    loop = Watched(60.0)
    assert loop.look(left=600.0) == []
    assert loop.look(2, left=5.0) == [2]


@pytest.mark.parametrize("what", ["busy", "leaves"])
def test_a_save_under_way_and_a_loop_that_can_leave_where_it_is_are_not_given_up(what: str) -> None:
    on = [True]
    loop = Watched(300.0, **{what: lambda: on[0]})
    assert loop.look() == []
    on[0] = False
    assert loop.look() == [1]


def test_the_thread_ends_when_it_is_told_to() -> None:
    watch = Watched(300.0, every_s=0.001).watch
    watch.start()
    watch.stop()
    assert not watch._thread.is_alive()
