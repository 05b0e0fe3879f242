"""One descriptor for many files."""

from pathlib import Path

import pytest

from verl_slurm.runs.follow_many import Watches


def test_files_that_grow_and_directories_that_get_entries_are_heard_of(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(300)]
    for path in paths:
        path.touch()
    with Watches() as watches:
        assert all(watches.add_file(path) for path in paths)
        assert watches.add_directory(tmp_path)
        assert watches.wait(0.0) == set()
        paths[7].write_text("x")
        paths[299].write_text("x")
        assert watches.wait(5.0) == {paths[7], paths[299]}
        (tmp_path / "new").mkdir()
        assert watches.wait(5.0) == {tmp_path}
        paths[7].read_bytes()
        assert watches.wait(0.0) == set(), "reading is no news"


def test_what_is_not_there_is_not_watched_and_what_is_forbidden_is_said(tmp_path: Path) -> None:
    with Watches() as watches:
        assert not watches.add_file(tmp_path / "nowhere")
        with pytest.raises(OSError, match="x" * 300):
            watches.add_file(tmp_path / ("x" * 300))


def test_a_file_that_was_removed_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    with Watches() as watches:
        watches.add_file(path)
        path.unlink()
        assert watches.wait(5.0) == set()


def test_so_much_news_that_the_kernel_lost_count_means_look_at_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.touch()
    overflow = b"\xff\xff\xff\xff\x00\x40\x00\x00" + bytes(8)
    with Watches() as watches:
        watches.add_file(path)
        path.write_text("x")
        monkeypatch.setattr(watches._inotify, "_readall", lambda: overflow)
        assert watches.wait(5.0) is None
