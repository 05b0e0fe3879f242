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


def test_a_missing_one_and_one_that_points_to_damage_want_the_newest_whole_step(
    verl_dir: Path, tmp_path: Path
) -> None:
    os.truncate(verl_dir / "global_step_6" / "data_0.pt", 3)
    found = look(verl_dir)
    assert (found.state, found.step, found.wanted) == ("broken", 6, 4)
    os.truncate(verl_dir / "global_step_4" / "data_0.pt", 3)
    assert look(verl_dir).wanted is None
    (tmp_path / "empty").mkdir()
    assert look(tmp_path / "empty").state == "absent"
    (make_directory(tmp_path / "d", 6) / TRACKER).unlink()
    assert look(tmp_path / "d").state == "missing", "verl would write over what is there"


def test_repair_replaces_it_at_once_and_keeps_who_may_read_it(verl_dir: Path) -> None:
    (verl_dir / TRACKER).write_text("")
    (verl_dir / TRACKER).chmod(0o644)
    write_tracker(verl_dir, 6)
    assert (verl_dir / TRACKER).read_bytes() == b"6"
    assert (verl_dir / TRACKER).stat().st_mode & 0o777 == 0o644
    assert look(verl_dir).state == "good"
    assert sorted(p.name for p in verl_dir.iterdir()) == ["global_step_4", "global_step_6", TRACKER]


@pytest.mark.parametrize("what", ["link", "directory"])
def test_what_cannot_be_read_is_said_and_repaired_where_it_can_be(
    verl_dir: Path, tmp_path: Path, what: str
) -> None:
    (verl_dir / TRACKER).unlink()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    if what == "link":
        (verl_dir / TRACKER).symlink_to(victim)
    else:
        (verl_dir / TRACKER).mkdir()
    found = look_at_tracker(verl_dir, judge_all(verl_dir))
    assert (found.state, found.wanted, found.needs_repair) == ("unreadable", 6, True)
    if what == "link":
        write_tracker(verl_dir, 6)
        assert (verl_dir / TRACKER).stat(follow_symlinks=False).st_mode & 0o777 == 0o600
        assert look(verl_dir).state == "good"
        assert victim.read_text() == "precious"
