"""The same on real file systems, with the real saver process: what the model of a disk cannot vouch for itself.

It mounts file systems in images, which needs root, and is skipped where that is not allowed. Not
reached from here, and not claimed: a server that goes away under NFS, Lustre or GPFS; drives that lie about a
flush; NVMe that loses power.
"""

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.faults.world import recover, tree_of
from tests.save.parts import Parts, checkpoint_saver, contents
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.save.ranks.collective import RanksFailed
from verl_slurm.save.ranks.saver import CheckpointSaver, SavedCheckpoint

pytestmark = [
    pytest.mark.torch,
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root"),
]

_GOING_DOWN = 0x8004587D
"""_IOR('X', 125, __u32) of ext4 and XFS: from now on nothing reaches the disk; as a power cut."""
_NO_LOG_FLUSH = 2


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(argv)}: {done.stderr.strip()}")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`mount(*arguments)`: mounts at one place, and unmounts what was there."""
    place = tmp_path / "mounted"
    place.mkdir()
    is_mounted = False  # a file system that was cut off does not even say that it is one

    def again(*arguments: str) -> Path:
        nonlocal is_mounted
        if is_mounted:
            subprocess.run(["umount", str(place)], check=True)
            is_mounted = False
        _run("mount", *arguments, str(place))
        is_mounted = True
        return place

    yield again
    if is_mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(params=["ext4", "xfs"])
def image(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file with a fresh file system in it."""
    tool = shutil.which(f"mkfs.{request.param}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if tool is None:
        pytest.skip(f"mkfs.{request.param} is not here")
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.truncate(320 << 20)
    _run(tool, "-q", str(path))
    return str(path)


def _cut_power(place: Path) -> None:
    fd = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _GOING_DOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(fd)


def _save(saver: CheckpointSaver, step: int) -> Future[SavedCheckpoint]:
    return saver.begin(contents(step))


def _run_directory(place: Path) -> Path:
    (place / "run").mkdir(mode=0o700, exist_ok=True)
    return place / "run"


def test_a_power_cut_right_after_the_promise_takes_nothing(mount: Callable[..., Path], image: str) -> None:
    place = mount("-o", "loop", image)
    run = _run_directory(place)
    os.sync()
    saver = checkpoint_saver(run, Parts())
    try:
        for step in (1, 2, 3):
            name = _save(saver, step).result().name
            promised = tree_of(run / "checkpoints" / name)
            _cut_power(place)
            mount("-o", "loop", image)
            choice = recover(place)
            assert (choice.name, choice.set_aside) == (name, ())
            assert choice.path is not None
            assert tree_of(choice.path) == promised
    finally:
        saver.close()


def test_a_power_cut_in_a_save_leaves_the_one_before(mount: Callable[..., Path], image: str) -> None:
    place = mount("-o", "loop", image)
    run = _run_directory(place)
    saver = checkpoint_saver(run, Parts())
    try:
        _save(saver, 1).result()
        for step in range(2, 8):
            under_way = _save(saver, step)
            _cut_power(place)
            try:
                newest = under_way.result().name
            except RanksFailed:
                newest = f"step_{step - 1:06d}"
            mount("-o", "loop", image)
            choice = recover(place)
            assert choice.set_aside == ()
            assert choice.name in (newest, f"step_{step:06d}")
            if choice.name != f"step_{step:06d}":
                _save(saver, step).result()
    finally:
        saver.close()


def test_a_full_disk_fails_the_save_and_with_room_the_next_one_goes_through(
    mount: Callable[..., Path],
) -> None:
    place = mount("-t", "tmpfs", "-o", "size=160k", "tmpfs")
    run = _run_directory(place)
    saver = checkpoint_saver(run, Parts())
    try:
        _save(saver, 1).result()
        (place / "others").write_bytes(bytes(56 << 10))
        with pytest.raises(RanksFailed, match=os.strerror(errno.ENOSPC)):
            _save(saver, 2).result()
        assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step_000001"]
        assert verify(run / "checkpoints/step_000001").ok
        (place / "others").unlink()
        assert _save(saver, 3).result().name == "step_000003"
        assert recover(place).name == "step_000003"
    finally:
        saver.close()


def test_a_disk_that_turns_read_only_fails_the_save_and_writable_again_takes_the_next(
    mount: Callable[..., Path],
) -> None:
    place = mount("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    run = _run_directory(place)
    saver = checkpoint_saver(run, Parts())
    try:
        _save(saver, 1).result()
        _run("mount", "-o", "remount,ro", str(place))
        with pytest.raises(RanksFailed, match=os.strerror(errno.EROFS)):
            _save(saver, 2).result()
        assert verify(run / "checkpoints/step_000001").ok
        _run("mount", "-o", "remount,rw", str(place))
        assert _save(saver, 3).result().name == "step_000003"
    finally:
        saver.close()
