import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from verl_slurm.base import kernel_facts
from verl_slurm.base.errors import DatasetDrift
from verl_slurm.base.kernel_facts import file_system, keeps_ctime, parse_mounts
from verl_slurm.base.paths import RunPaths
from verl_slurm.dataset.fingerprint import cache as hash_cache, data_record as prints
from verl_slurm.dataset.fingerprint.cache import decode, default_path, encode, settled
from verl_slurm.dataset.fingerprint.data_record import (
    Survey,
    check_dataset,
    drift,
    fingerprint,
    remember,
    survey,
    write,
)
from verl_slurm.dataset.fingerprint.file_hashing import Hashed, ListedFile

SECOND = 1_000_000_000


def later() -> int:
    """A clock by which every file here has been at rest for long."""
    return 1 << 62


Look = Callable[..., Survey]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    (root / "part").mkdir(parents=True)
    (root / "a.jsonl").write_text("a\n")
    (root / "b.jsonl").write_text("b\n")
    (root / "part" / "c.jsonl").write_text("c\n")
    (root / "link.jsonl").symlink_to("a.jsonl")
    (root / "empty").mkdir()
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache.hashes"


@pytest.fixture
def look(root: Path, cache: Path) -> Callable[..., Survey]:
    """A look that remembers."""

    def run(*, full: bool = False, clock_ns: Callable[[], int] = later) -> Survey:
        seen = survey(root, cache=cache, full=full, clock_ns=clock_ns)
        assert remember(cache, seen) is None
        return seen

    return run


def test_an_unchanged_tree_is_not_read_again_and_is_the_same(root: Path, cache: Path, look: Look) -> None:
    first = look()
    assert (first.num_read, first.notices) == (4, ())
    again = look()
    assert (again.num_read, again.found) == (0, fingerprint(root))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700


def test_what_changed_is_read_again_and_nothing_else(root: Path, look: Look) -> None:
    old = look().found
    (root / "b.jsonl").write_text("B\n")
    (root / "part" / "c.jsonl").unlink()
    (root / "part" / "d.jsonl").write_text("d\n")
    new = look()
    assert new.num_read == 2
    assert new.found == fingerprint(root)
    difference = drift(old, new.found)
    assert (difference.changed, difference.added, difference.removed) == (
        ("b.jsonl",),
        ("part/d.jsonl",),
        ("part/c.jsonl",),
    )


@pytest.mark.parametrize("how", ["in place", "another file", "exchanged", "link moved", "folder emptied"])
def test_a_change_with_size_and_mtime_as_before_is_seen(root: Path, look: Look, how: str) -> None:
    look()
    path = root / "a.jsonl"
    info = path.stat()
    if how == "in place":
        path.write_text("X\n")
    elif how == "another file":
        (root / "new").write_text("X\n")
        (root / "new").rename(path)
    elif how == "exchanged":
        other = root / "b.jsonl"
        os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))
        path.rename(root / "x")
        other.rename(path)
        (root / "x").rename(other)
    elif how == "link moved":
        (root / "link.jsonl").unlink()
        (root / "link.jsonl").symlink_to("b.jsonl")
    else:
        (root / "part" / "c.jsonl").unlink()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert look().found == fingerprint(root)


def test_full_finds_what_no_stamp_can_show_and_names_it(root: Path, cache: Path, look: Look) -> None:
    # Nothing but the kernel sets ctime, so the record is forged instead: as if `a` had been of other content.
    look()
    known = decode(cache.read_bytes())
    wrong = known | {"a.jsonl": msgspec.structs.replace(known["a.jsonl"], sha256="0" * 64)}
    assert hash_cache.save(cache, wrong) is None
    assert look().found.files["a.jsonl"].sha256 == "0" * 64
    full = look(full=True)
    assert (full.unnoticed, full.num_read) == (("a.jsonl",), 4)
    assert full.found == fingerprint(root)
    assert look(full=True).unnoticed == ()


def test_a_file_as_young_as_the_look_is_read_again(root: Path, look: Look) -> None:
    born = (root / "b.jsonl").stat().st_ctime_ns

    def soon() -> int:
        return born + 1 * SECOND

    look(clock_ns=soon)
    assert look(clock_ns=soon).num_read == 4
    assert look().num_read == 4
    assert look().num_read == 0


def test_a_file_that_was_too_young_to_keep_is_gone_when_it_goes(root: Path, look: Look) -> None:
    os.utime(root / "b.jsonl", (1 << 33, 1 << 33))
    look()
    assert look().num_read == 1
    (root / "b.jsonl").unlink()
    assert look().found == fingerprint(root)
    assert look().num_read == 0


def kept(root: Path, mtime_s: int, ctime_s: int, began_ns: int) -> bool:
    stamp = (2, 3, mtime_s * SECOND, ctime_s * SECOND)
    files = {"a.jsonl": ListedFile(stamp, root.stat().st_dev, False)}
    hashed = {"a.jsonl": Hashed(stamp, "0" * 64, 0)}
    return bool(settled(root, files, hashed, {"a.jsonl"}, began_ns))


def test_when_a_stamp_is_old_enough(root: Path) -> None:
    assert not kept(root, 100, 100, 100 * SECOND)
    assert not kept(root, 100, 100, 160 * SECOND)
    assert kept(root, 100, 100, 160 * SECOND + 1)
    assert not kept(root, 900, 100, 200 * SECOND)  # from the future
    assert not kept(root, 100, 900, 200 * SECOND)


@pytest.mark.parametrize("kind", ["fuse.sshfs", "vfat", "cifs", "squashfs", "something new", ""])
def test_where_ctime_proves_nothing_no_stamp_is_ever_old_enough_nor_any_cache_believed(
    root: Path, look: Look, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look()
    monkeypatch.setattr(kernel_facts, "file_system", lambda path: kind)
    assert look().num_read == 4, "cached where it was known"
    assert look().num_read == 4
    monkeypatch.setattr(kernel_facts, "file_system", lambda path: "nfs4")
    assert look().num_read == 4
    assert look().num_read == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b" ",
        lambda data: data.replace(b"cache 2", b"cache 1"),
        lambda data: data.replace(b",2,", b",3,", 1),
        lambda data: b"\xff" * 300,
    ],
)
def test_a_damaged_cache_is_ignored_said_and_made_anew(
    root: Path, cache: Path, look: Look, damage: Callable[[bytes], bytes]
) -> None:
    look()
    cache.write_bytes(damage(cache.read_bytes()))
    seen = look()
    assert (seen.num_read, seen.found) == (4, fingerprint(root))
    assert "is not used and made anew" in seen.notices[0]
    assert look().num_read == 0


@pytest.mark.parametrize("fault", ["open to others", "link", "pipe", "folder"])
def test_a_cache_that_others_could_have_written_is_ignored(cache: Path, look: Look, fault: str) -> None:
    look()
    if fault == "open to others":
        cache.chmod(0o640)
    elif fault == "link":
        cache.rename(cache.with_name("real"))
        cache.symlink_to("real")
    else:
        cache.unlink()
        os.mkfifo(cache) if fault == "pipe" else cache.mkdir()
    seen = survey(cache.parent / "data", cache=cache, clock_ns=later)
    assert seen.num_read == 4
    assert seen.notices


def test_a_whole_body_of_the_wrong_shape_is_no_cache() -> None:
    rows = {"a": Hashed((1, 2, 3, 4), "0" * 64, 5)}
    assert decode(encode(rows)) == rows
    for body in (b"[]", b"[" * 100_000, b'{"a":[[1,2,3],"0",5]}', b"null"):
        head = b"verl-slurm hash cache 2\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"
        with pytest.raises((ValueError, RecursionError), match=r"\w"):
            decode(head + body)


def test_a_cache_that_cannot_be_kept_is_said_and_nothing_else(root: Path, tmp_path: Path) -> None:
    told = remember(tmp_path / "nowhere" / "cache", survey(root))
    assert told is not None
    assert "cannot be kept" in told


def test_mounts_are_read_and_lines_that_are_none_passed_over(tmp_path: Path) -> None:
    text = (
        "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
        "37 35 0:45 / /data rw - nfs4 server:/a\\040b rw,vers=4.2\n"
        "nonsense\n"
    )
    assert parse_mounts(text) == {"36": "ext3", "37": "nfs4"}
    assert file_system(Path("/proc/self/status")) == "proc"
    assert not keeps_ctime(Path("/proc/self/status"))
    assert file_system(tmp_path / "nowhere") == ""


def test_trees_without_a_run_are_kept_in_a_private_folder_and_the_oldest_go(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = default_path(root)
    assert default_path(root / "part" / "..") == path != default_path(root / "part")
    monkeypatch.setattr(hash_cache, "_KEPT", 2)
    path.parent.mkdir(parents=True)
    for age, name in enumerate(("old.hashes", "older.hashes", "oldest.hashes")):
        (path.parent / name).write_bytes(b"")
        os.utime(path.parent / name, (1000 - age, 1000 - age))
    assert remember(path, survey(root)) is None
    assert sorted(p.name for p in path.parent.iterdir()) == sorted([path.name, "old.hashes"])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_run_reads_all_before_it_records_and_only_what_changed_after_that(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    monkeypatch.setattr(hash_cache, "_YOUNG_NS", -(1 << 62))
    reads: list[int] = []
    real = prints.hash_files

    def counted(*args: object, **kwargs: object) -> dict[str, Hashed]:
        found = real(*args, **kwargs)  # type: ignore[arg-type]
        reads.append(len(found))
        return found

    monkeypatch.setattr(prints, "hash_files", counted)
    first = check_dataset(paths, root)
    assert check_dataset(paths, root) == first
    assert reads == [4]
    (root / "b.jsonl").write_text("B\n")
    with pytest.raises(DatasetDrift, match=r"1 changed \(b\.jsonl\)"):
        check_dataset(paths, root)
    assert reads == [4, 1]
    accepted = prints.look(paths, root, first, may_record=True)
    assert reads == [4, 1, 4]
    assert accepted.found == fingerprint(root)


def test_a_daemon_is_told_of_a_damaged_cache_and_still_finds_the_drift(root: Path, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    write(paths, fingerprint(root))
    paths.hash_cache.write_bytes(b"damaged")
    (root / "b.jsonl").write_text("B\n")
    told: list[str] = []
    with pytest.raises(DatasetDrift):
        check_dataset(paths, root, notice=told.append)
    assert len(told) == 1
    assert msgspec.json.encode(told)
