import hashlib
import os
from pathlib import Path

import pytest

from verl_slurm.base.errors import CheckpointCorrupt, DataError, DatasetDrift
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.dataset.fingerprint import data_record as module
from verl_slurm.dataset.fingerprint.data_record import (
    DataPlace,
    Drift,
    check_dataset,
    data_place,
    drift,
    fingerprint,
    look,
    read,
    survey,
    write,
)
from verl_slurm.dataset.fingerprint.entries import sealed
from verl_slurm.dataset.fingerprint.file_hashing import Hashed


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    (root / "part").mkdir(parents=True)
    (root / "a.jsonl").write_text("a\n")
    (root / "b.jsonl").write_text("b\n")
    (root / "part" / "c.jsonl").write_text("c\n")
    return root


def test_added_removed_and_changed_files_are_listed_and_nothing_else(root: Path) -> None:
    old = fingerprint(root)
    assert not drift(old, fingerprint(root))
    (root / "a.jsonl").unlink()
    (root / "part" / "c.jsonl").write_text("C\n")
    (root / "part" / "d.jsonl").write_text("d\n")
    (root / "b.jsonl").touch()
    new = fingerprint(root)
    assert drift(old, new) == Drift(added=("part/d.jsonl",), removed=("a.jsonl",), changed=("part/c.jsonl",))
    assert new.digest != old.digest
    expected = "1 changed (part/c.jsonl), 1 added (part/d.jsonl), 1 removed (a.jsonl)"
    assert drift(old, new).one_line() == expected


def test_content_name_and_kind_count_and_times_and_modes_do_not(root: Path, tmp_path: Path) -> None:
    first = fingerprint(root)
    os.utime(root / "a.jsonl", (1, 1))
    (root / "a.jsonl").chmod(0o600)
    assert fingerprint(root) == first
    (root / "a.jsonl").rename(root / "z.jsonl")
    assert fingerprint(root).digest != first.digest
    (root / "z.jsonl").rename(tmp_path / "z")
    (root / "a.jsonl").symlink_to(tmp_path / "z")
    assert drift(first, fingerprint(root)).changed == ("a.jsonl",)
    (root / "a.jsonl").unlink()
    (tmp_path / "z").rename(root / "a.jsonl")
    assert fingerprint(root) == first
    (root / "empty").mkdir()
    assert drift(first, fingerprint(root)).added == ("empty",)


@pytest.mark.parametrize("fault", ["missing", "file", "empty", "broken link", "loop", "pipe", "not utf-8"])
def test_a_root_that_cannot_be_hashed_is_a_data_error_with_a_remedy(
    root: Path, tmp_path: Path, fault: str
) -> None:
    target = root
    if fault == "missing":
        target = tmp_path / "nowhere"
    elif fault == "file":
        target = root / "a.jsonl"
    elif fault == "empty":
        target = tmp_path / "none"
        (target / "sub").mkdir(parents=True)
    elif fault == "broken link":
        (root / "x").symlink_to("nowhere")
    elif fault == "loop":
        (root / "part" / "up").symlink_to(root)
    elif fault == "pipe":
        os.mkfifo(root / "p")
    else:
        (root / os.fsdecode(b"\xff.jsonl")).write_bytes(b"x")
    with pytest.raises(DataError, match=r"data\.root"):
        fingerprint(target)


def test_a_tree_that_changes_at_each_look_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.hash_files

    def slow(where: Path, lines: list[str]) -> dict[str, Hashed]:
        result = real(where, lines)
        with (root / "b.jsonl").open("a") as file:
            file.write("more\n")
        return result

    monkeypatch.setattr(module, "hash_files", slow)
    with pytest.raises(DataError, match="changes while it is read"):
        fingerprint(root)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_file_that_changes_once_around_its_reading_is_read_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    real = module.hash_files
    rounds: list[int] = []

    def once(where: Path, lines: list[str]) -> dict[str, Hashed]:
        rounds.append(len(lines))
        if len(rounds) == 1 and when == "before":
            (root / "b.jsonl").write_text("B\n")
        result = real(where, lines)
        if len(rounds) == 1 and when == "after":
            (root / "b.jsonl").write_text("B\n")
        return result

    monkeypatch.setattr(module, "hash_files", once)
    found = fingerprint(root)
    assert found.files["b.jsonl"].sha256 == hashlib.sha256(b"B\n").hexdigest()
    assert rounds == ([3, 1] if when == "after" else [3])


def test_a_file_that_appears_while_the_tree_is_read_is_in_the_result(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.hash_files

    def once(where: Path, lines: list[str]) -> dict[str, Hashed]:
        (root / "late.jsonl").write_text("late\n") if not (root / "late.jsonl").exists() else None
        (root / "a.jsonl").unlink(missing_ok=True) if "a.jsonl" not in "".join(lines) else None
        return real(where, lines)

    monkeypatch.setattr(module, "hash_files", once)
    found = fingerprint(root).files
    assert "late.jsonl" in found
    assert "a.jsonl" not in found


def test_a_file_that_vanishes_while_the_tree_is_read_is_not_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.hash_files

    def once(where: Path, names: list[str]) -> dict[str, Hashed]:
        (root / "a.jsonl").unlink(missing_ok=True)
        return real(where, names)

    monkeypatch.setattr(module, "hash_files", once)
    assert [*fingerprint(root).files] == ["b.jsonl", "part/c.jsonl"]


def test_links_to_blobs_and_to_directories_are_what_they_lead_to(root: Path, tmp_path: Path) -> None:
    """The layout of Hugging Face's cache."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/1f").write_text("rows\n")
    (root / "train.jsonl").symlink_to("../blobs/1f")
    (root / "more").symlink_to("../blobs")
    first = fingerprint(root)
    assert {path: entry.kind for path, entry in first.files.items() if entry.size == 5} == {
        "more/1f": "file",
        "train.jsonl": "link",
    }
    (tmp_path / "blobs/1f").rename(tmp_path / "blobs/2e")
    (root / "train.jsonl").unlink()
    (root / "train.jsonl").symlink_to("../blobs/2e")
    assert drift(first, fingerprint(root)) == Drift(added=("more/2e",), removed=("more/1f",))
    (tmp_path / "blobs/2e").write_text("ROWS\n")
    assert drift(first, fingerprint(root)).changed == ("train.jsonl",)


def test_it_is_recorded_and_read_back_and_damage_to_the_record_is_noticed(
    root: Path, paths: RunPaths
) -> None:
    paths.root.mkdir()
    assert read(paths) is None
    found = fingerprint(root)
    write(paths, found)
    assert read(paths) == found
    assert paths.fingerprint.stat().st_mode & 0o777 == 0o600
    text = paths.fingerprint.read_text()
    for broken in (text.replace('"size": 2', '"size": 3', 1), text[:-20], "{}", '{"format":1,"format":1}'):
        paths.fingerprint.write_text(broken)
        with pytest.raises(CheckpointCorrupt):
            read(paths)


def test_a_run_refuses_changed_data_names_it_and_takes_it_when_told(root: Path, paths: RunPaths) -> None:
    paths.root.mkdir()
    first = check_dataset(paths, root)
    assert check_dataset(paths, root) == first
    (root / "a.jsonl").write_text("A\n")
    with pytest.raises(DatasetDrift, match=r"1 changed \(a\.jsonl\)"):
        check_dataset(paths, root)
    accepted = look(paths, root, first, may_record=True).found
    write(paths, accepted)
    assert check_dataset(paths, root) == accepted != first


def test_the_digest_is_what_it_always_was(tmp_path: Path) -> None:
    # The recorded fingerprints of running runs depend on it.
    (tmp_path / "empty").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"x\n")
    (tmp_path / "b.y").symlink_to("b/x")
    (tmp_path / "\u00e9").write_bytes(b"")
    sha = {data: hashlib.sha256(data).hexdigest() for data in (b"x\n", b"")}
    text = (
        "verl-slurm tree 1\n"
        "link\0b.y\0" + f"2\0{sha[b'x' + bytes([10])]}\n"
        f"file\0b/x\0" + f"2\0{sha[b'x' + bytes([10])]}\n"
        "directory\0empty\0" + "0\0\n"
        "file\0\u00e9\0" + f"0\0{sha[b'']}\n"
    )
    assert fingerprint(tmp_path).digest == hashlib.sha256(text.encode()).hexdigest()


def test_without_its_record_a_run_is_held_to_what_its_checkpoint_was_trained_on(
    root: Path, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    digest = check_dataset(paths, root).digest
    paths.fingerprint.unlink()
    check_dataset(paths, root, trained_on=digest)
    paths.fingerprint.unlink()
    (root / "new.jsonl").write_text("{}\n")
    with pytest.raises(DatasetDrift, match="names the files, is gone"):
        check_dataset(paths, root, trained_on=digest)
    assert not paths.fingerprint.exists()


def test_files_by_name_are_compared_and_one_that_is_away_is_waited_for(paths: RunPaths, root: Path) -> None:
    """verl's files: whatever else lies beside them is not looked at."""
    paths.root.mkdir()
    (root / "link.jsonl").symlink_to(root / "part/c.jsonl")
    files = (str(root / "a.jsonl"), str(root / "link.jsonl"))
    first = check_dataset(paths, files)
    (root / "b.jsonl").write_text("other\n")
    assert check_dataset(paths, files) == first
    assert look(paths, files, first).num_read == 2, "young files are read again"
    (root / "part/c.jsonl").write_text("C\n")
    with pytest.raises(DatasetDrift, match=r"a\.jsonl, .*link\.jsonl.*1 changed \(.*link\.jsonl\)"):
        check_dataset(paths, files)
    below = survey((str(root / "part"),)).found.files
    assert [*below] == [str(root / "part/c.jsonl").lstrip("/")], "a directory stands for its files"
    (root / "a.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl"):
        check_dataset(paths, files)


def recorded_whole(paths: RunPaths, root: Path, *names: str) -> None:
    """Records as of before a rule that leaves `names` out."""
    seen = fingerprint(root)
    entry = next(iter(seen.files.values()))
    write(paths, sealed({**seen.files, **dict.fromkeys(names, entry)}))


_OF_EDITORS = [
    ".a.jsonl.swp",
    "a.jsonl~",
    ".#a.jsonl",
    "#a.jsonl#",
    ".~lock.a.csv#",
    ".nfs00000000012ab34c00000001",
]


@pytest.mark.parametrize(
    "name", [*_OF_EDITORS, "part/.DS_Store", ".ipynb_checkpoints/a-checkpoint.jsonl", ".git/index"]
)
@pytest.mark.parametrize("by_verl", [False, True])
def test_what_editors_and_the_like_leave_beside_the_data_is_said_and_ends_no_run(
    root: Path, paths: RunPaths, name: str, by_verl: bool
) -> None:
    private_dir(paths.root)
    place: DataPlace = (str(root),) if by_verl else root
    first = check_dataset(paths, place)
    (root / name).parent.mkdir(exist_ok=True)
    # The lock of Emacs is a link that leads nowhere.
    (root / name).symlink_to("user@host.123") if name.startswith(".#") else (root / name).write_text("x")
    notices: list[str] = []
    assert check_dataset(paths, place, notice=notices.append) == first
    told = name if name.startswith("part") else name.partition("/")[0]
    assert [text for text in notices if "left out" in text and text.endswith(told)]
    if not by_verl:
        recorded_whole(paths, root, name)
        check_dataset(paths, place)
    (root / "c.jsonl").write_text("c\n")
    with pytest.raises(DatasetDrift, match=r"1 added \([^ ]*c\.jsonl\)"):
        check_dataset(paths, place)


@pytest.mark.parametrize("folder", ["", "train/"])
def test_caches_of_datasets_beside_what_it_saved_are_no_change(
    root: Path, paths: RunPaths, folder: str
) -> None:
    private_dir(paths.root)
    (root / folder).mkdir(exist_ok=True)
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
        (root / folder / name).write_text("{}")
    first = check_dataset(paths, root)
    caches = [
        f"{folder}{name}" for name in ("cache-1a2b.arrow", "cache-1a2b_00000_of_00004.arrow", "tmpa1_b2c3d")
    ]
    for name in caches:
        (root / name).write_text("x")
    notices: list[str] = []
    assert check_dataset(paths, root, notice=notices.append) == first
    assert caches[0] in notices[0]
    # A glob of the user's takes them as little.
    assert [*survey(data_place(root, f"{folder}*.arrow")).found.files] == [
        f"{folder}data-00000-of-00001.arrow"
    ]
    recorded_whole(paths, root, *caches)
    check_dataset(paths, root)
    (root / "part" / "cache-1a2b.arrow").write_text("not beside a saved data set")
    with pytest.raises(DatasetDrift, match=r"1 added \(part/cache-1a2b\.arrow\)"):
        check_dataset(paths, root)


@pytest.mark.parametrize("pattern", ["*.jsonl", "part/*.jsonl", "**/*.jsonl"])
def test_a_glob_of_files_is_held_to_the_files_that_it_takes(
    root: Path, paths: RunPaths, pattern: str
) -> None:
    private_dir(paths.root)
    place = data_place(root, pattern)
    first = check_dataset(paths, place)
    assert [*first.files] == {"*.jsonl": ["a.jsonl", "b.jsonl"], "part/*.jsonl": ["part/c.jsonl"]}.get(
        pattern, ["a.jsonl", "b.jsonl", "part/c.jsonl"]
    )
    # What lies beside them may be anything, and change.
    (root / "my.yaml").write_text("steps: 1")
    os.mkfifo(root / "pipe")
    (root / "lib").symlink_to("nowhere")
    (root / "empty").mkdir()
    assert check_dataset(paths, place) == first
    added = pattern.replace("**/", "").replace("*", "new")
    (root / added).write_text("new\n")
    with pytest.raises(DatasetDrift, match=rf"1 added \({added}\)"):
        check_dataset(paths, place)


def test_a_record_of_the_whole_directory_holds_a_glob_to_its_files(root: Path, paths: RunPaths) -> None:
    private_dir(paths.root)
    whole = check_dataset(paths, root)
    place = data_place(root, "*.jsonl")
    (root / "part" / "c.jsonl").write_text("C\n")
    assert check_dataset(paths, place) == whole, "manifests bear its digest"
    (root / "b.jsonl").write_text("B\n")
    with pytest.raises(DatasetDrift, match=r"1 changed \(b\.jsonl\)"):
        check_dataset(paths, place)


@pytest.mark.parametrize("pattern", [None, "part/*.jsonl"])
def test_data_whose_mount_point_is_empty_is_away_and_not_changed(
    root: Path, paths: RunPaths, pattern: str | None
) -> None:
    private_dir(paths.root)
    for name in ("a.jsonl", "b.jsonl"):
        (root / name).unlink()
    place = data_place(root, pattern)
    check_dataset(paths, place)
    (root / "part" / "c.jsonl").unlink()
    with pytest.raises(DataError, match="the data set is empty") as caught:
        check_dataset(paths, place)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
