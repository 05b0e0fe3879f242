"""What is said about releases of verl."""

from typing import Any

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.verl.releases import RELEASES, judge, require_usable


def test_a_release_that_was_run_says_how() -> None:
    for version, entries in RELEASES.items():
        for entry in entries:
            release = require_usable(version, entry)
            assert release.version == version
            assert version in release.line


@pytest.mark.parametrize("version", ["0.9.2", "1.0.0.dev1", "0.10", "main"])
def test_one_that_nobody_ran_is_named_and_so_are_those_that_were(version: str) -> None:
    release = require_usable(version, "sft")
    assert release.word == "unknown"
    assert version in release.line
    assert "0.9.1" in release.line
    assert "\n" not in release.line


@pytest.mark.parametrize(
    ("version", "entry"),
    [("0.8.0", "ppo"), ("0.7.1", "ppo"), ("0.7.1", "sft"), ("0.2.0.post2", "sft"), ("0.1", "ppo")],
)
def test_one_without_what_we_hold_on_to_is_refused_with_the_one_to_install(version: str, entry: Any) -> None:
    assert judge(version, entry).word == "too_old"
    with pytest.raises(ConfigError, match=r"cannot be run.*found 0.*pip install verl==0\.9\.1"):
        require_usable(version, entry)


def test_what_is_too_old_for_ppo_may_do_for_sft() -> None:
    assert require_usable("0.8.0", "sft").word == "run"
