"""What is said about releases of verl."""

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.verl.releases import RELEASES, require_usable


@pytest.mark.parametrize("version", RELEASES)
def test_of_a_release_that_was_run_nothing_has_to_be_known(version: str) -> None:
    assert require_usable(version) == ""


@pytest.mark.parametrize("version", ["0.9.2", "1.0.0.dev1", "0.10", "main"])
def test_one_that_nobody_ran_is_named_and_so_are_those_that_were(version: str) -> None:
    note = require_usable(version)
    assert version in note
    assert "0.9.1" in note
    assert "\n" not in note


@pytest.mark.parametrize("version", ["0.8.0", "0.7.1", "0.2.0.post2", "0.1"])
def test_one_without_what_we_hold_on_to_is_refused_with_the_one_to_install(version: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be run.*found 0.*pip install verl==0\.9\.1"):
        require_usable(version)
