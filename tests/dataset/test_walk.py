from pathlib import Path

import pytest

from verl_slurm.dataset.fingerprint import walk as data_walk
from verl_slurm.dataset.fingerprint.walk import glance, lines_of, walk


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders enough for all cores: three."""
    monkeypatch.setattr(data_walk, "num_threads", lambda: 3)
    for name in ("a", "b b", "c\nd", "e"):
        (tmp_path / name / "part").mkdir(parents=True)
        (tmp_path / name / "part" / "x").write_text(name)
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("e.txt")
    return tmp_path


def seen(root: Path) -> list[str]:
    return sorted(lines_of(root, glance(root, lambda: None)[0]) or ())


def test_several_finds_say_together_what_the_walk_says(root: Path) -> None:
    starts = data_walk._starts(str(root))
    assert [len(names) for names in starts] == [4, 3, 3]
    assert seen(root) == sorted(walk(root))


@pytest.mark.parametrize("name", ["-delete", "!", "(", ")x", ",", "-"])
def test_a_name_that_find_would_take_for_an_option_is_a_name(root: Path, name: str) -> None:
    (root / name).mkdir()
    (root / name / "x").write_text("x")
    assert seen(root) == sorted(walk(root))


def test_a_find_for_each_core_or_folder_and_one_where_names_are_many(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(data_walk._starts(str(root / "a"))) == 1
    monkeypatch.setattr(data_walk, "num_threads", lambda: 64)
    assert len(data_walk._starts(str(root))) == data_walk._MOST_FINDS
    monkeypatch.setattr(data_walk, "_MOST_NAMES", 9)
    assert data_walk._starts(str(root)) == [[]]
    assert seen(root) == sorted(walk(root))


def test_when_one_of_them_fails_none_is_believed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_walk, "_starts", lambda root: [["a"], ["gone"]])
    assert glance(root, lambda: 7) == (None, 7)


def test_an_unchanged_tree_is_said_in_the_same_order_each_time(root: Path) -> None:
    assert glance(root, lambda: None)[0] == glance(root, lambda: None)[0]
