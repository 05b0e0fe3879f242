"""Whether waiting for the end of a step is worth it."""

from verl_slurm.loops.reach import reach


def test_without_a_deadline_everything_is_reached() -> None:
    assert reach(seconds_left=None, running_s=1e9, steps_s=[600.0], save_s=60.0).ok


def test_a_step_that_was_never_measured_is_waited_for() -> None:
    found = reach(seconds_left=20.0, running_s=3.0, steps_s=[], save_s=None)
    assert found.ok
    assert "no step was measured" in found.reason


def test_the_longest_of_the_last_steps_counts_and_older_ones_do_not() -> None:
    recent = [10.0, 10.0, 50.0, 10.0, 10.0]
    assert not reach(seconds_left=45.0, running_s=0.0, steps_s=recent, save_s=None).ok
    assert reach(seconds_left=45.0, running_s=0.0, steps_s=[50.0, *[10.0] * 5], save_s=None).ok


def test_the_save_behind_the_step_needs_its_time_too() -> None:
    assert reach(seconds_left=40.0, running_s=8.0, steps_s=[10.0], save_s=20.0).ok
    found = reach(seconds_left=30.0, running_s=8.0, steps_s=[10.0], save_s=20.0)
    assert not found.ok
    assert found.needed_s == 3.0 + 30.0
    assert found.reason == (
        "steps take up to 10.0 s, this one runs for 8.0 s, a save takes 20.0 s: 33 s needed, 30 s left"
    )


def test_a_step_that_is_overdue_may_end_at_any_moment() -> None:
    assert reach(seconds_left=1.0, running_s=100.0, steps_s=[10.0], save_s=None).ok


def test_a_save_that_alone_takes_too_long_is_not_waited_for_in_the_first_step() -> None:
    assert not reach(seconds_left=20.0, running_s=0.0, steps_s=[], save_s=30.0).ok


def test_when_the_deadline_is_over_nothing_is_reached() -> None:
    found = reach(seconds_left=-1.0, running_s=0.0, steps_s=[], save_s=None)
    assert (found.ok, found.reason) == (False, "the deadline is over")
