"""A request in the middle of a step is answered then, where its end comes too late."""

from pathlib import Path

from tests.fakes.daemon import Daemon
from verl_slurm.loops.session import Session
from verl_slurm.loops.step_end import ReachWatch
from verl_slurm.wire.messages import RankSaveFailed, SaveRequest


def _session(line: Daemon, steps_s: tuple[float, ...]) -> Session:
    now = [0.0]
    session = Session(line, rank=0, world_size=1, clock=lambda: now[0])
    session.started()
    for step, seconds in enumerate(steps_s, 1):
        now[0] += seconds
        session.step_done(step)
    return session


def test_a_step_of_minutes_and_a_grace_of_seconds_is_given_up_once_and_at_once(tmp_path: Path) -> None:
    line = Daemon()
    watch = ReachWatch(_session(line, (300.0, 310.0)))
    watch.look()
    assert line.heard(RankSaveFailed) == []
    line.asked = SaveRequest(request_id=1, stop=True, seconds_left=30.0)
    watch.look()
    watch.look()
    [failure] = line.heard(RankSaveFailed)
    assert failure.request_id == 1
    assert "cannot be reached: steps take up to 310.0 s" in failure.reason


def test_one_whose_end_comes_in_time_is_left_to_the_loop() -> None:
    line = Daemon()
    watch = ReachWatch(_session(line, (3.0, 3.0)))
    line.asked = SaveRequest(request_id=1, stop=True, seconds_left=30.0)
    watch.look()
    assert line.heard(RankSaveFailed) == []


def test_nobody_waits_for_an_operators_save() -> None:
    line = Daemon()
    watch = ReachWatch(_session(line, (300.0, 300.0)))
    line.asked = SaveRequest(request_id=1, stop=False, seconds_left=30.0)
    watch.look()
    assert line.heard(RankSaveFailed) == []


def test_each_request_is_judged_by_its_own_deadline() -> None:
    line = Daemon()
    watch = ReachWatch(_session(line, (60.0, 60.0)))
    line.asked = SaveRequest(request_id=1, stop=True, seconds_left=600.0)
    watch.look()
    line.asked = SaveRequest(request_id=2, stop=True, seconds_left=5.0)
    watch.look()
    assert [failure.request_id for failure in line.heard(RankSaveFailed)] == [2]


def test_the_thread_ends_when_it_is_told_to() -> None:
    line = Daemon()
    watch = ReachWatch(_session(line, (300.0, 300.0)), every_s=0.001)
    watch.start()
    watch.stop()
    assert not watch._thread.is_alive()


def test_a_save_that_is_under_way_is_not_thrown_away_with_the_step() -> None:
    line, busy = Daemon(), [True]
    watch = ReachWatch(_session(line, (300.0, 300.0)), busy=lambda: busy[0])
    line.asked = SaveRequest(request_id=1, stop=True, seconds_left=30.0)
    watch.look()
    assert line.heard(RankSaveFailed) == []
    busy[0] = False
    watch.look()
    assert [failure.request_id for failure in line.heard(RankSaveFailed)] == [1]


def test_a_loop_that_can_leave_where_it_is_answers_itself() -> None:
    line, leaves = Daemon(), [True]
    watch = ReachWatch(_session(line, (300.0, 300.0)), leaves=lambda: leaves[0])
    line.asked = SaveRequest(request_id=1, stop=True, seconds_left=30.0)
    watch.look()
    assert line.heard(RankSaveFailed) == []
    leaves[0] = False
    watch.look()
    assert [failure.request_id for failure in line.heard(RankSaveFailed)] == [1]
