"""The declared table of model families, and the page that shows it."""

import pytest

from tests.families import PAGE, page


@pytest.mark.scenario("USE04")
def test_the_page_of_models_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m tests.families"
