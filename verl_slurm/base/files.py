"""Durable, private writes: new files, fsync, rename, modes.

POSIX guarantees this: after `write_file` returns, the new bytes are found under the name after a power cut. Before it
returns, the old bytes or the new ones are found, never a mixture. NFS guarantees less: it may report a failed write
only at close (so close is checked), and a rename may succeed and still report ESTALE. An fsync error is final for
that file: ext4, XFS and Btrfs mark the pages clean, and a second fsync reports a false success (Rebello et al., "Can
applications recover from fsync failures?", USENIX ATC 2020).
"""

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from verl_slurm.base.bounded import TooMuch, named, open_regular
from verl_slurm.base.errors import PermissionRefused
from verl_slurm.base.one_line import shell_word

# Bytes of a key, an address or a plan: some KB.
_MAX_PRIVATE = 1 << 20
# Mode of a directory of ours that is open to a group (`open_to_group`). The set-group-ID bit tells it from
# one that is open by accident, and gives the group to the files in it.
_SHARED = 0o2750
_GROUP_READS = 0o040
# 4 MiB: above 1 MiB the speed no longer depends on it (1.7 GB/s a core with SHA extensions).
_HASHED = 4 << 20
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def private_dir(path: Path, inside: Path | None = None) -> Path:
    """Makes `path` and its parents durably and requires our own uid and mode 0700, or that of `open_to_group`.

    Args:
        inside: a folder above that must be there: a run that was moved or unmounted is not made again in its place.
    """
    # Noted before mkdir: afterwards nothing tells which names are new and have to be made durable.
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    if inside is not None and inside in made:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(inside))
    # One by one, each in a parent that is there: mkdir with `parents` would make `inside` if it went this moment.
    for folder in reversed(made):
        with suppress(FileExistsError):  # another process was first
            folder.mkdir(mode=0o700)
    # Owner and mode are asked of the descriptor: the name may be exchanged between two calls. mkdir with exist_ok
    # accepts anybody's directory of that name.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise no_directory(error, path) from error
    try:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid():
            raise PermissionRefused(
                "the directory belongs to another user",
                where=path,
                found=f"uid {info.st_uid}",
                expected=f"uid {os.geteuid()}",
                remedy="choose another run directory",
            )
        if stat.S_IMODE(info.st_mode) & 0o077 and stat.S_IMODE(info.st_mode) != _SHARED:
            # Ours and too open: tightened. Somebody else's is refused above, because its owner can open it again.
            with named(path):
                os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
    for folder in made:
        # An entry of a new directory survives a power cut only if the directory's own name does.
        with suppress(PermissionError):  # we may have the right to write and not to read
            fsync_path(folder.parent)
    return path


def no_directory(error: OSError, path: Path) -> OSError | PermissionRefused:
    """Returns what an opening with O_DIRECTORY and O_NOFOLLOW has met, in words where it is a link or a file."""
    # A link gives either, by kernel and file system.
    if error.errno not in (errno.ELOOP, errno.ENOTDIR):
        return error
    return PermissionRefused(
        "a directory of the run is none",
        where=path,
        found=f"a link to {os.readlink(path)}" if path.is_symlink() else "something else",
        expected="a directory",
        remedy="move the real one here; a directory above the run may be a link",
    )


def open_to_group(path: Path, gid: int | None) -> None:
    """Lets the members of a group list a directory of ours and read its files, also those to come; None: lets nobody.

    Raises:
        OSError: the group is none of ours, or the directory is not.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if gid is None and stat.S_IMODE(os.fstat(fd).st_mode) != _SHARED:
            return  # it never was open, and nothing in it
        _set_group(fd, gid, 0o700 if gid is None else _SHARED)
        for name in os.listdir(fd):
            _set_group_of(name, fd, None if _is_private(name) else gid)
    finally:
        os.close(fd)


def _is_private(name: str) -> bool:
    # Hidden files are caches and marks. submitit's pickles lie among the logs.
    return name.startswith(".") or name.endswith(".pkl")


def _set_group(fd: int, gid: int | None, mode: int) -> None:
    if gid is not None:
        os.fchown(fd, -1, gid)
    os.fchmod(fd, mode)


def _set_group_of(name: str, folder: int, gid: int | None) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except OSError:
        return  # gone meanwhile, or a link
    try:
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
            _set_group(fd, gid, info.st_mode & 0o700 | (0 if gid is None else _GROUP_READS))
    finally:
        os.close(fd)


def share_output(folder: Path) -> None:
    """Opens standard output and error to the group, if they are files in this directory and it is open to one."""
    for fd in (1, 2):
        with suppress(OSError):
            place = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if place.parent == folder and stat.S_ISREG(os.fstat(fd).st_mode):
                _share(fd, place)


def _share(fd: int, path: Path) -> None:
    """Gives a file of ours the mode that its directory asks for."""
    if not _is_private(path.name) and stat.S_IMODE(path.parent.stat().st_mode) == _SHARED:
        # Not by `os.open`: the umask is 077.
        os.fchmod(fd, 0o600 | _GROUP_READS)


def open_log(path: Path, flags: int = 0) -> int:
    """Opens a log of ours to append to it, made if it does not exist; `flags`: more of them, e.g. `os.O_NONBLOCK`."""
    flags |= os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_WRONLY)
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_WRONLY | os.O_CREAT, 0o600)
        with suppress(OSError):  # a log that the group cannot read is better than none
            _share(fd, path)
        return fd


def make_private(path: Path) -> Path:
    """Makes a directory with an unguessable name inside a private one; it may exist already.

    Raises:
        OSError: the storage refuses, or others could exchange the directory that holds `path`.
    """
    if path.exists():
        return path
    try:
        # mkdir passes through a directory that another user made first, so the folder above is checked as well.
        # On a node's own disk there is no run, and its folders are made.
        of_run = path.parent.name == "checkpoints"
        private_dir(path.parent, inside=path.parent.parent if of_run else None)
        require_safe_folder(path.parent.parent, "others can put a directory of theirs in the place of ours")
    except PermissionRefused as error:
        # For a save this is a failure of one medium like any other; the other medium may still succeed.
        raise OSError(errno.EPERM, str(error)) from error
    # Another thread, the writer process or a rank of this node was first; the name is unguessable, so it was one of
    # ours.
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    return path


def _others_may_replace(folder: os.stat_result) -> bool:
    # In a sticky directory others may add names and can replace none of ours. Root is trusted: it can do anything
    # anyway.
    writable = bool(folder.st_mode & 0o022) and not folder.st_mode & stat.S_ISVTX
    return writable or folder.st_uid not in {0, os.geteuid()}


def require_safe_folder(folder: Path, what: str, remedy: str = "") -> None:
    """Raises PermissionRefused for a folder, or a link, by which others could replace our files.

    Args:
        what: what they could do, for the error.
        remedy: what else than `chmod go-w` helps.
    """
    info = folder.lstat()
    # A link of ours or root's is followed. One of another user's is judged as it is, and refused by its owner: they may
    # turn it at any time.
    if stat.S_ISLNK(info.st_mode) and info.st_uid in {0, os.geteuid()}:
        info = folder.stat()
    if _others_may_replace(info):
        raise PermissionRefused(
            what,
            where=folder,
            found=_mode_and_owner(info),
            expected=f"a directory of uid {os.geteuid()} or root that others cannot write to, or a sticky one (1777)",
            remedy=f"chmod go-w {shell_word(folder)}" + (f", or {remedy}" if remedy else ""),
        )


def unsafe_on_the_way(path: Path) -> tuple[Path, str] | None:
    """Returns the first directory, from the root to `path`, in which others could replace the way to our files, with
    its mode and owner; None: there is none. Names that do not exist yet are left out.
    """
    # Both ways count: a link on the written way can be turned, and a directory on the resolved way can be exchanged.
    written = Path(os.path.abspath(path))
    for way in dict.fromkeys((written, Path(os.path.realpath(path)))):
        for folder in (*reversed(way.parents), way):
            try:
                info = folder.stat()
            except OSError:
                # What does not exist yet will be made by us, below directories that were checked.
                break
            if _others_may_replace(info):
                return folder, _mode_and_owner(info)
    return None


def _mode_and_owner(info: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(info.st_mode):04o}, uid {info.st_uid}"


def require_safe_way(path: Path, key: str) -> None:
    """Raises PermissionRefused if others could replace a directory on the way to `path`; `key` names the path."""
    if (found := unsafe_on_the_way(path)) is not None:
        raise PermissionRefused(
            "others can put a directory of theirs in the place of ours",
            where=f"{key}: {found[0]}",
            found=found[1],
            expected=f"directories of uid {os.geteuid()} or root that others cannot write to, or sticky ones (1777)",
            remedy=f"set {key} to a directory below such ones, or have the sticky bit set (chmod +t)",
        )


def require_own(
    info: os.stat_result,
    where: Path,
    what: str = "programs are not started from what others could have written",
    remedy: str = "see who put it there",
    within: Path | None = None,
) -> None:
    """Raises PermissionRefused for a file or directory of another user, or one that others can write to.

    Args:
        what: what is not done because of it, for the error.
        remedy: what helps, besides `chmod go-w`.
        within: the directory that is closed as a whole.
    """
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        kind = "directory" if stat.S_ISDIR(info.st_mode) else "file"
        raise PermissionRefused(
            what,
            where=where,
            found=_mode_and_owner(info),
            expected=f"a {kind} of uid {os.geteuid()} that others cannot write to",
            remedy=f"{remedy}; if it is yours: "
            # Where one file of it is open to others, more may be.
            + (f"chmod -R go-w {shell_word(within)}" if within else f"chmod go-w {shell_word(where)}"),
        )


def fsync_path(path: Path) -> None:
    """Makes the present content of a file or directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replaces `path` by `data`, atomically and durably, with mode 0600 or as `open_to_group` has it.

    Args:
        durable: False: after a power cut there may be the old content, the new one, or an empty file.
    """
    # Beside the target, since rename works within one file system. The suffix is random, so that two writers never
    # share a temporary file.
    temp = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    # The bytes are synced before the name points to them. Otherwise a power cut may leave the new name with an empty
    # file.
    write_new(temp, [data], durable=durable, shared_as=path)
    try:
        os.rename(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    if durable:
        # The rename is an entry of the folder: without this a power cut may bring the old file back.
        fsync_path(path.parent)


def rename(source: Path, target: Path, *, durable: bool = True) -> None:
    """Renames to a new name, or over a file or an empty directory; not `durable`: a power cut may undo it."""
    os.rename(source, target)
    if durable:
        # The new name first: a power cut in between leaves the entry under two names, and never under none.
        for folder in dict.fromkeys((target.parent, source.parent)):
            fsync_path(folder)


def open_new(path: Path | str, *, dir_fd: int | None = None) -> int:
    """Makes a file, 0600, and returns a descriptor for reading and writing. FileExistsError: the name is taken."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # A link of that name is not followed.
    return os.open(path, flags, 0o600, dir_fd=dir_fd)


def write_new(
    path: Path, blocks: Iterable[bytes], *, durable: bool = True, shared_as: Path | None = None
) -> None:
    """Makes a file, 0600, from these blocks. Its bytes are durable on return; its name is once its folder is.

    Args:
        shared_as: the name that it gets, by which `open_to_group` may give it another mode.

    Raises:
        FileExistsError: the name is taken.
        OSError: it was not written whole; the rest is removed.
    """
    fd = open_new(path)
    try:
        with named(shared_as or path):
            try:
                if shared_as is not None:
                    _share(fd, shared_as)
                for block in blocks:
                    view = memoryview(block)
                    while view:
                        # A write may be short (a signal, a quota, a nearly full disk) and still be no error.
                        view = view[os.write(fd, view) :]
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)  # NFS may report a failed write here
    except BaseException:
        # Half a file must not keep its name: a retry would find it taken.
        path.unlink(missing_ok=True)
        raise


def create_file(path: Path, data: bytes, *, temp: Path | None = None) -> bool:
    """Makes `path`, 0600, with this content, atomically and durably; returns False if the name is taken.

    One of several callers wins, on POSIX and on NFS, and no reader sees a half-written file; without links, a reader
    may find it empty. `temp`: an unguessable name beside it; None: one is made.
    """
    temp = temp or path.parent / f"{path.stem}.{secrets.token_hex(8)}.tmp"
    try:
        # Whole and durable under another name first: link(2) then publishes it in one step, with its content.
        write_file(temp, data)
        # link(2) refuses a name that exists, and rename would replace it: here the first caller has to win.
        os.link(temp, path, follow_symlinks=False)
    except FileExistsError:
        return False
    except FileNotFoundError:  # the name's owner removed our temporary file
        if path.exists():
            return False
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            # No links here (FAT, some network file systems). O_EXCL still lets one caller win, though a reader may see
            # it empty.
            write_new(path, [data])
        except FileExistsError:
            return False
    finally:
        temp.unlink(missing_ok=True)
    fsync_path(path.parent)
    return True


def append_line(path: Path, line: bytes, *, durable: bool = True) -> None:
    """Appends one whole line in one write (O_APPEND: two writers never mix on a local disk). May raise OSError.

    If it is not `durable`, the system decides when the line reaches the disk.
    """
    # O_RDWR, not O_WRONLY: the last byte is read below.
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with named(path):
            size = os.fstat(fd).st_size
            if size == 0:
                _share(fd, path)
            # A power cut may have left half a line: a newline goes first, so that only that half is lost.
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            data = (b"\n" if torn else b"") + line + b"\n"
            # No second write for the rest: between the two, another writer's line could get in. The half that is
            # there is closed by the next line's newline.
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(fd)
    finally:
        os.close(fd)


def read_private(path: Path) -> bytes:
    """Reads a secret: a regular 0600 file of ours with one link. Refuses anything else."""
    try:
        fd = open_regular(path)
    except TooMuch as error:
        raise PermissionRefused(
            "not a plain file of ours",
            where=path,
            found=error,
            expected=f"a regular file, mode 0600, uid {os.geteuid()}",
            remedy=f"see who put it there: ls -ld {shell_word(path)}",
        ) from None
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(file.fileno())
        mode = stat.S_IMODE(info.st_mode)
        # One link: a second name could lie where others read. Asked of the descriptor, so that what is judged is what
        # is read.
        ours = info.st_uid == os.geteuid() and info.st_nlink == 1
        if not ours or mode & 0o077:
            raise PermissionRefused(
                "a file that holds a secret is open to others",
                where=path,
                found=f"mode {mode:04o}, uid {info.st_uid}",
                expected=f"mode 0600, uid {os.geteuid()}",
                remedy=f"chmod 600 {shell_word(path)}",
            )
        if info.st_size > _MAX_PRIVATE:
            raise PermissionRefused(
                "a file that holds a secret is too large",
                where=path,
                found=f"{info.st_size} bytes",
                expected=f"at most {_MAX_PRIVATE}",
            )
        return file.read(_MAX_PRIVATE)


def hash_fd(fd: int) -> tuple[int, str]:
    """Returns size in bytes and SHA-256 (hex) of all that `fd` holds, read from its start. May raise OSError."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    digest = hashlib.sha256()
    size = 0
    buffer = memoryview(bytearray(min(_HASHED, max(os.fstat(fd).st_size, 4096))))
    while count := os.preadv(fd, [buffer], size):
        digest.update(buffer[:count])
        size += count
    return size, digest.hexdigest()


def num_threads() -> int:
    """Returns the number of hashing threads: the cores we may use, at most 8 (beyond that storage is the limit)."""
    # hashlib releases the interpreter lock for blocks above 2 KiB, so threads use all cores.
    return max(1, min(8, len(os.sched_getaffinity(0))))
