"""The record of replaced rewards and the wish for another, as files."""

import stat
from pathlib import Path

import pytest

from tests.builders import reward_switch
from verl_slurm.base.errors import CheckpointCorrupt, PermissionRefused
from verl_slurm.base.files import write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.wire.reward_plan import (
    RewardPlan,
    RewardSwitch,
    ask_for_reward,
    read_reward_plan,
    read_reward_request,
    write_reward_plan,
)


def _switch(step: int) -> RewardSwitch:
    return reward_switch(f"rule:{step}", step, request=step + 1, warm_start_steps=1, replaced="rule:first")


def test_a_run_whose_reward_was_never_replaced_has_no_record(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert read_reward_plan(paths) == RewardPlan()
    assert read_reward_request(paths) is None


def test_each_step_has_one_reward(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_reward_plan(paths, RewardPlan(handled=6, switches=(_switch(2), _switch(5))))
    plan = read_reward_plan(paths)
    assert [plan.in_force(plan.at(step), "rule:first") for step in range(7)] == [
        *["rule:first"] * 2,
        *["rule:2"] * 3,
        *["rule:5"] * 2,
    ]


@pytest.mark.parametrize("data", [b"", b"[]", b'{"version":2}', b'{"more":1}', b"\xff"])
def test_a_record_that_cannot_be_read_is_no_empty_record(tmp_path: Path, data: bytes) -> None:
    write_file(RunPaths(tmp_path).reward_plan, data)
    with pytest.raises(CheckpointCorrupt, match=r"rewards\.json"):
        read_reward_plan(RunPaths(tmp_path))


def test_two_replacements_at_one_step_are_no_record(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for steps in ((2, 2), (5, 2)):
        write_reward_plan(paths, RewardPlan(switches=tuple(map(_switch, steps))))
        with pytest.raises(CheckpointCorrupt):
            read_reward_plan(paths)


def test_each_wish_has_a_number_of_its_own_answered_or_not(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert ask_for_reward(paths, "rule:a", 3).number == 1
    assert ask_for_reward(paths, "rule:b", 3).number == 2
    write_reward_plan(paths, RewardPlan(handled=7))
    third = ask_for_reward(paths, "rule:c", 0)
    assert third.number == 8
    assert read_reward_request(paths) == third
    assert stat.S_IMODE(paths.reward_request.stat().st_mode) == 0o600


def test_a_wish_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    ask_for_reward(paths, "rule:a", 3)
    paths.reward_request.chmod(0o620)
    with pytest.raises(PermissionRefused):
        read_reward_request(paths)


def test_a_record_that_others_could_have_written_is_refused_and_so_is_a_link(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_reward_plan(paths, RewardPlan(handled=6, switches=(_switch(2),)))
    paths.reward_plan.chmod(0o664)
    with pytest.raises(PermissionRefused, match="chmod 600"):
        read_reward_plan(paths)
    paths.reward_plan.chmod(0o600)
    theirs = paths.reward_plan.rename(tmp_path / "theirs.json")
    paths.reward_plan.symlink_to(theirs)
    with pytest.raises(PermissionRefused, match="not a plain file of ours"):
        read_reward_plan(paths)
