import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from verl_slurm.base.errors import DatasetDrift
from verl_slurm.base.mounts import Mount, mount_of, mounts, parse_mounts
from verl_slurm.base.paths import RunPaths
from verl_slurm.dataset.fingerprint import cache as hash_cache, record as prints, walk as data_walk
from verl_slurm.dataset.fingerprint.cache import (
    HashCache,
    decode,
    default_path,
    encode,
    here,
    is_settled,
    text_of,
)
from verl_slurm.dataset.fingerprint.entries import FileDigest, sealed
from verl_slurm.dataset.fingerprint.hashing import Digests
from verl_slurm.dataset.fingerprint.record import (
    Survey,
    check_dataset,
    drift,
    fingerprint,
    remember,
    survey,
    write,
)
from verl_slurm.dataset.fingerprint.walk import Line, glance, line_of, lines_of, parse_line, walk

SECOND = 1_000_000_000
EXT4 = Mount("ext4", "/dev/sda")


def later() -> int:
    """A clock by which every file here has been at rest for long."""
    return 1 << 62


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


Look = Callable[..., Survey]


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
    wrong = dict(known.fingerprint.files) | {"a.jsonl": FileDigest(size=2, sha256="0" * 64)}
    assert hash_cache.save(cache, replace(known, fingerprint=sealed(wrong))) is None
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


def test_when_a_stamp_is_old_enough() -> None:
    young = Line("file", "a", 1, 2, 3, mtime_ns=100 * SECOND, ctime_ns=100 * SECOND)
    assert not is_settled(young, EXT4, 100 * SECOND)
    assert not is_settled(young, EXT4, 160 * SECOND)
    assert is_settled(young, EXT4, 160 * SECOND + 1)
    assert not is_settled(young._replace(mtime_ns=900 * SECOND), EXT4, 200 * SECOND)  # from the future
    assert not is_settled(young._replace(ctime_ns=900 * SECOND), EXT4, 200 * SECOND)


def test_where_ctime_proves_nothing_no_stamp_is_ever_old_enough() -> None:
    old = Line("file", "a", 1, 2, 3, mtime_ns=SECOND, ctime_ns=SECOND)
    for kind in ("fuse.sshfs", "vfat", "cifs", "squashfs", "something new"):
        assert not is_settled(old, Mount(kind, "x"), later())
    assert not is_settled(old, None, later())
    assert is_settled(old, Mount("nfs4", "server:/data"), later())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b" ",
        lambda data: data.replace(b"cache 1", b"cache 2"),
        lambda data: data.replace(b'"size":2', b'"size":3', 1),
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
    whole = encode(HashCache(fingerprint=sealed({"a": FileDigest(size=1, sha256="0" * 64)})))
    assert decode(whole).fingerprint.files["a"].size == 1
    for body in (b"{}", b"[" * 100_000, b'{"tree":1}', b"null"):
        head = b"verl-slurm hash cache 1\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"
        with pytest.raises(ValueError, match=r"\w"):
            decode(head + body)


def test_lines_that_do_not_fit_their_digest_are_not_known() -> None:
    files = sealed({"a": FileDigest(size=1, sha256="0" * 64)})
    good = "f 1 2 1 5.0000000000 5.0000000000 a"
    bad = ["f 1 2 7 5.0000000000 5.0000000000 a", "l 1 2 1 5.0000000000 5.0000000000 a", "f x", "", "d a"]
    cache = HashCache(fingerprint=files, text=text_of([good, *bad]))
    assert set(cache.known()) == {good}


def test_a_cache_that_cannot_be_kept_is_said_and_nothing_else(root: Path, tmp_path: Path) -> None:
    told = remember(tmp_path / "nowhere" / "cache", survey(root))
    assert told is not None
    assert "cannot be kept" in told


def test_find_and_the_walk_of_our_own_say_the_same(root: Path) -> None:
    (root / "a name\nwith \\ and \u00e9 d 1").write_text("x")
    os.utime(root / "b.jsonl", ns=(1, 1_234_567_891))
    seen, other = glance(root, lambda: 7)
    assert other == 7
    assert sorted(lines_of(root, seen) or ()) == sorted(walk(root))
    info = (root / "b.jsonl").stat()
    assert parse_line(line_of("f", info, "b.jsonl")) == Line(
        "file", "b.jsonl", info.st_dev, info.st_ino, 2, 1_234_567_891, info.st_ctime_ns
    )


@pytest.mark.parametrize(
    "fault", ["missing find", "pipe", "link to a folder", "broken link", "not utf-8", "no root"]
)
def test_what_find_cannot_tell_is_left_to_the_walk(
    root: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "missing find":
        monkeypatch.setattr(data_walk, "_FIND", "/nowhere/find")
    elif fault == "pipe":
        os.mkfifo(root / "p")
    elif fault == "link to a folder":
        (root / "x").symlink_to("part")
    elif fault == "broken link":
        (root / "x").symlink_to("nowhere")
    elif fault == "not utf-8":
        (root / os.fsdecode(b"\xff")).write_bytes(b"")
    else:
        root = root / "nowhere"
    assert lines_of(root, glance(root, lambda: None)[0]) is None


def test_without_find_the_cache_still_serves(root: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    look()
    monkeypatch.setattr(data_walk, "_FIND", "/nowhere/find")
    again = look()
    assert (again.num_read, again.found) == (0, fingerprint(root))


def test_mounts_are_read_and_lines_that_are_none_passed_over(tmp_path: Path) -> None:
    text = (
        "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
        "37 35 0:45 / /data rw - nfs4 server:/a\\040b rw,vers=4.2\n"
        "nonsense\n38 35 x:y / / rw - ext4 /dev/a rw\n39 35 1:2 - \n"
    )
    listed = parse_mounts(text)
    assert [(number, mount.kind) for number, _, mount in listed] == [("36", "ext3"), ("37", "nfs4")]
    assert [mount.name for _, _, mount in listed] == [None, "nfs4 server:/a b"]
    proc = mount_of("/proc/self/status")
    assert proc is not None
    assert (proc.kind, proc.keeps_ctime) == ("proc", False)
    assert mounts()[os.stat("/proc").st_dev] == proc
    assert mount_of(tmp_path / "nowhere") is None


def test_a_shared_file_system_has_another_number_on_each_node_and_one_mounted_twice_has_none() -> None:
    share = Mount("nfs4", "server:/data")
    lines = frozenset(
        ["d part", "f 45 2 1 5.0000000000 5.0000000000 a", "f 9 2 1 5.0000000000 5.0000000000 b"]
    )
    cache = HashCache(fingerprint=sealed({}), text=text_of(lines), devices={"45": "nfs4 server:/data"})
    moved = here(cache, {77: share, 9: EXT4})
    assert "f 77 2 1 5.0000000000 5.0000000000 a" in moved.lines()
    assert lines - set(moved.lines()) == {"f 45 2 1 5.0000000000 5.0000000000 a"}
    assert moved.devices == {"77": "nfs4 server:/data"}
    assert here(cache, {45: share}) == cache
    assert here(cache, {77: share, 78: share}) == cache


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

    def counted(*args: object, **kwargs: object) -> Digests:
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
