import os
from pathlib import Path

import pytest

from tests.verl.verl_steps import make_directory
from verl_slurm.verl.shards import judge_all
from verl_slurm.verl.tracker import (
    TRACKER,
    Tracker,
    judge_tracker,
    look_at_tracker,
    read_tracker,
    write_tracker,
)

pytestmark = pytest.mark.torch


def look(directory: Path) -> Tracker:
    return judge_tracker(read_tracker(directory), judge_all(directory))


@pytest.mark.parametrize(
    ("content", "state"),
    [
        ("6", "good"),
        (" 6\n", "good"),
        ("", "empty"),
        ("\n", "empty"),
        ("abc", "garbage"),
        ("6.0", "garbage"),
        ("\x1b[2J", "garbage"),
        ("8", "nowhere"),
        ("-6", "nowhere"),
        ("4", "behind"),
    ],
)
def test_each_case_of_what_verl_crashes_on_or_starts_over_from(
    verl_dir: Path, content: str, state: str
) -> None:
    (verl_dir / TRACKER).write_text(content)
    found = look(verl_dir)
    assert (found.state, found.wanted) == (state, 6)
    assert found.needs_repair is (state != "good")
    assert "\x1b" not in found.line


def test_missing_beside_checkpoints_means_that_verl_would_write_over_them(verl_dir: Path) -> None:
    (verl_dir / TRACKER).unlink()
    assert look(verl_dir).state == "missing"


def test_missing_in_an_empty_directory_is_as_it_should_be(tmp_path: Path) -> None:
    assert look(tmp_path).state == "absent"


def test_pointing_to_a_damaged_step_wants_the_newest_whole_one(verl_dir: Path) -> None:
    os.truncate(verl_dir / "global_step_6" / "data_0.pt", 3)
    found = look(verl_dir)
    assert (found.state, found.step, found.wanted) == ("broken", 6, 4)


def test_with_no_whole_step_there_is_nothing_to_point_to(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "d", 6)
    os.truncate(directory / "global_step_6" / "data_0.pt", 3)
    found = look(directory)
    assert (found.state, found.wanted) == ("broken", None)


def test_repair_replaces_it_at_once_and_keeps_who_may_read_it(verl_dir: Path) -> None:
    (verl_dir / TRACKER).write_text("")
    (verl_dir / TRACKER).chmod(0o644)
    write_tracker(verl_dir, 6)
    assert (verl_dir / TRACKER).read_bytes() == b"6"
    assert (verl_dir / TRACKER).stat().st_mode & 0o777 == 0o644
    assert look(verl_dir).state == "good"
    assert sorted(p.name for p in verl_dir.iterdir()) == ["global_step_4", "global_step_6", TRACKER]


def test_a_link_in_its_place_is_refused_on_reading_and_replaced_by_a_repair(
    verl_dir: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (verl_dir / TRACKER).unlink()
    (verl_dir / TRACKER).symlink_to(victim)
    with pytest.raises(OSError):
        read_tracker(verl_dir)
    write_tracker(verl_dir, 6)
    assert victim.read_text() == "precious"
    assert (verl_dir / TRACKER).read_text() == "6"


@pytest.mark.parametrize("what", ["link", "directory"])
def test_what_cannot_be_read_is_said_and_repaired_where_it_can_be(
    verl_dir: Path, tmp_path: Path, what: str
) -> None:
    (verl_dir / TRACKER).unlink()
    if what == "link":
        (verl_dir / TRACKER).symlink_to(tmp_path / "elsewhere")
    else:
        (verl_dir / TRACKER).mkdir()
    found = look_at_tracker(verl_dir, judge_all(verl_dir))
    assert (found.state, found.wanted, found.needs_repair) == ("unreadable", 6, True)
    if what == "link":
        write_tracker(verl_dir, 6)
        assert (verl_dir / TRACKER).stat(follow_symlinks=False).st_mode & 0o777 == 0o600
        assert look(verl_dir).state == "good"
