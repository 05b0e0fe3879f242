"""docs/scenarios.md is what the tests say of themselves, and no row is without a test."""

from tests.scenarios import PAGE, page, read_rows, shown


def test_every_scenario_has_a_test_and_every_mark_has_a_scenario() -> None:
    rows = {row for part in read_rows().values() for row in part}
    assert rows == set(shown())


def test_what_only_a_soak_shows_is_shown_in_small_by_make_test_too() -> None:
    only = [row for row, tests in shown().items() if all(test.lane == "soak" for test in tests)]
    assert not only


def test_the_page_is_the_one_that_the_marks_give() -> None:
    assert PAGE.read_text() == page(), "python -m tests.scenarios"
