"""What a save costs is by how much longer the steps beside it are; every second here is given, none is measured."""

from verl_slurm.trainer.save_pace import CostMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """Goes through steps of given length."""

    def __init__(self) -> None:
        self.clock, self.step = Clock(), 0
        self.meter = CostMeter(self.clock)

    def steps(self, *seconds: float) -> None:
        for spent in seconds:
            self.clock.now += spent
            self.step += 1
            self.meter.step_end(self.step)


def test_the_first_step_of_a_process_is_not_measured() -> None:
    run = Run()
    run.steps(60.0)
    assert run.meter.step_s is None
    run.steps(2.0, 3.0, 4.0)
    assert run.meter.step_s == 3.0
    assert run.meter.save_s is None


def test_a_save_costs_what_the_steps_beside_it_took_longer() -> None:
    run = Run()
    run.steps(9.0, 2.0, 2.0)
    run.meter.save_began()
    run.steps(2.5)
    assert run.meter.save_s is None  # it is still being written
    run.clock.now += 1.0
    run.meter.save_ended()
    run.steps(1.25)
    assert run.meter.save_s == 0.5 + 0.25
    assert run.meter.step_s == 2.0
    run.steps(4.0)
    assert run.meter.step_s == 2.0  # the median of 2, 2 and 4


def test_an_evaluation_is_no_part_of_a_step_and_no_cost_of_a_save() -> None:
    run = Run()
    run.steps(9.0, 2.0)
    run.meter.leave_out(30.0)
    run.steps(32.0, 2.0)
    assert run.meter.step_s == 2.0
    run.meter.save_began()
    run.meter.leave_out(30.0)
    run.steps(32.5)
    run.meter.save_ended()
    run.steps(2.0)
    run.steps(2.0)
    assert run.meter.save_s == 0.5
    assert run.meter.step_s == 2.0


def test_a_save_that_slows_nothing_costs_nothing_and_never_less() -> None:
    run = Run()
    run.steps(1.0, 2.0)
    run.meter.save_began()
    run.meter.save_ended()
    run.steps(1.5)
    assert run.meter.save_s == 0.0


def test_the_median_of_many_saves_outlives_one_slow_step() -> None:
    run = Run()
    run.steps(1.0, 1.0)
    for beside in (1.5, 90.0, 1.5):
        run.meter.save_began()
        run.meter.save_ended()
        run.steps(beside, 1.0)
    assert run.meter.save_s == 0.5


def test_where_no_step_was_ever_without_a_save_its_cost_is_not_known() -> None:
    run = Run()
    run.steps(1.0)
    run.meter.save_began()
    run.meter.save_ended()
    run.steps(5.0)
    assert (run.meter.save_s, run.meter.step_s) == (None, None)


def test_a_partial_save_is_no_measure_of_a_full_one() -> None:
    run = Run()
    run.steps(1.0, 1.0)
    run.meter.save_began(counts=False)
    run.meter.save_ended()
    run.steps(5.0, 1.0)
    assert (run.meter.save_s, run.meter.step_s) == (None, 1.0)
    run.meter.save_began()
    run.meter.save_began(counts=False)
    run.meter.save_ended()
    run.steps(5.0, 1.0)
    assert run.meter.save_s is None
    run.meter.save_began()
    run.meter.save_ended()
    run.steps(3.0)
    assert run.meter.save_s == 2.0


def test_steps_that_passed_unasked_are_shared_out() -> None:
    run = Run()
    run.steps(1.0)
    run.clock.now += 6.0
    run.meter.step_end(4)
    assert run.meter.step_s == 2.0
