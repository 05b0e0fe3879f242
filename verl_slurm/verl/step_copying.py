"""Makes a second copy of a step's files: a clone where the file system can share blocks, else byte by byte, or a hard
link.

A clone (reflink: XFS, Btrfs, bcachefs, some NFS) takes no space and is as independent as a copy. A hard link takes none
either, but is the same file, and made only on request. If plain verl saves that step again in the old directory,
torch.save truncates and rewrites it, and with it our checkpoint. The digests show that, but the checkpoint is lost.
"""

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.files import open_new
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.tree import open_below, open_directory
from verl_slurm.verl.shards import Identity, identity_of, trust_problem

How = Literal["clone", "copy", "link"]

# _IOW(0x94, 9, int) of linux/fs.h, https://man7.org/linux/man-pages/man2/ioctl_ficlone.2.html
_FICLONE = 0x40049409
_BLOCK = 16 << 20
_NO_RANGE = {
    errno.EXDEV,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EBADF,
    errno.ETXTBSY,
}


def how_to_copy(source: Path, target: Path) -> How:
    """Returns `clone` if files of `source` and `target` can share blocks, tried on one; else `copy`."""
    # Random, and removed below: it must not be a file of the copy.
    probe = target / f".clone.{secrets.token_hex(8)}"
    try:
        first = next(Path(folder) / names[0] for folder, _, names in os.walk(source) if names)
        with open_directory(first.parent) as root, open_below(root, first.name) as fd:
            made = open_new(probe)
            try:
                fcntl.ioctl(made, _FICLONE, fd)
            finally:
                os.close(made)
    except (OSError, StopIteration):
        return "copy"
    finally:
        with suppress(OSError):
            probe.unlink()
    return "clone"


def copy_files(
    source: Path,
    target: Path,
    files: Mapping[str, Identity],
    how: How,
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Makes `target`, a new directory, with `files` of `source` in it, all 0600 in directories of 0700. Not durable.

    A file that a link would place outside `source` is never opened. Each file must be the very one that was judged: its
    name may now belong to another user's file.

    Args:
        files: relative, `/` between names; with the identity that `judge_step` saw of each.

    Raises:
        CheckpointCorrupt: a file is another than the one that was judged, or has changed since.
        OSError: a file cannot be read, written, or, with `link`, linked (EXDEV: another file system).
    """
    target.mkdir(mode=0o700)
    # Sorted, so that each directory comes before what is in it.
    for folder in sorted({name[:at] for name in files for at, char in enumerate(name) if char == "/"}):
        (target / folder).mkdir(mode=0o700)
    with open_directory(source) as root:
        for name, judged in files.items():
            with open_below(root, name) as fd:
                _require_judged(fd, source / name, judged, how)
                if how == "link":
                    # By the descriptor: the name might have become another file's since it was judged. Because a
                    # directory is given, Python calls linkat(2), which follows the link in /proc; link(2) would not.
                    os.link(f"/proc/self/fd/{fd}", target / name, src_dir_fd=root, follow_symlinks=True)
                    on_bytes(os.fstat(fd).st_size)
                else:
                    _copy(fd, target / name, on_bytes)
                    # A process that opened the file for writing before it was judged may have written in between.
                    _require_judged(fd, source / name, judged, how)


def _require_judged(fd: int, path: Path, judged: Identity, how: How) -> None:
    info = os.fstat(fd)
    # A hard link changes ctime itself, and two names in a step may be one file. Only its owner can set an mtime back.
    count = len(judged) - 1 if how == "link" else len(judged)
    found = trust_problem(info) if stat.S_ISREG(info.st_mode) else "is no regular file"
    if not found and identity_of(info)[:count] != judged[:count]:
        found = "another file, or other bytes"
    if found:
        raise CheckpointCorrupt(
            "not the file that was judged",
            where=path,
            found=found,
            expected="what was read and judged before",
            remedy=f"see that nothing writes there (chmod -R go-w {shell_word(path.parent)}), and adopt again",
        )


def _copy(fd: int, target: Path, on_bytes: Callable[[int], None]) -> None:
    made = open_new(target)
    try:
        done, in_kernel = 0, True
        while True:
            count = 0
            # Shares blocks where the file system can (Linux 4.5).
            if in_kernel:
                try:
                    count = os.copy_file_range(fd, made, _BLOCK, done, done)
                except OSError as error:
                    if error.errno not in _NO_RANGE:
                        raise
                    in_kernel = False
            if not count:
                # Also on 0 bytes: some file systems report the end in the middle of a file.
                in_kernel = False
                data = os.pread(fd, _BLOCK, done)
                # A write may be short; the loop goes on from what was written.
                count = os.pwrite(made, data, done) if data else 0
            if not count:
                return
            done += count
            on_bytes(count)
    finally:
        os.close(made)
