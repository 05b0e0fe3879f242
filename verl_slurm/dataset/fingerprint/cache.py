"""Caches the hashes of a data set's files, so that an unchanged tree need not be read again.

```
verl-slurm hash cache 2 LF
SHA-256 (hex) of the rest LF
{PATH: [[INODE, SIZE, MTIME, CTIME], SHA-256, MODE], ...}       JSON of `Hashed`
```

Mode 0600, at most 256 MiB. It can be removed at any time. The file is not trusted blindly: one that is not whole, not
ours or of another format is ignored and made anew, and a notice says so.

An entry is trusted on this ground: a file with the same path, inode, size, mtime and ctime has the same content. ctime
carries the argument: the kernel sets it at each write, at each change of mtime (so a forged mtime is seen) and when an
inode is made (so a reused inode number, on NFS or a local disk, is seen), and no program can set it. The number of the
device is no part of it: each node has another one for the same file system. Two kinds of files are therefore never
cached, and read at each look:

* files on a file system for which this is not known (see `base.kernel_facts`), on the node that looks;
* files whose stamp was less than a minute old, or in the future, when the hashing began (git calls them racy). They
  could be written again without a new stamp: within the same clock tick (0.01 s), or second (2 s on old file systems),
  by the clock of a server that differs from ours, or through a mapping: a dirty page gets no new stamp until it was
  written back (half a minute, by the kernel's defaults).

Some changes remain that only reading everything (`--full`) can see: a clock set back, so that a later write gets the
earlier stamp; content changed below the file system (bad medium, restored image); writes through a mapping where pages
are not written back in that time (tmpfs, or `vm.dirty_expire_centisecs` raised); on NFS, a write of another node less
than `acregmax` ago (60 s), because `stat` answers from the node's own cache.
"""

import hashlib
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import Limit, check_json, decode_json, open_regular, read_fd
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.kernel_facts import keeps_ctime
from verl_slurm.dataset.fingerprint.file_hashing import Hashed, ListedFile

_LIMIT = Limit(num_bytes=256 << 20, num_values=8_000_000)
"""About 150 bytes and eight values per file: enough for a million files."""
_HEAD = b"verl-slurm hash cache 2\n"
_HEX = 64
# Above each delay that the module names: a clock's tick, a second or two, the kernel's write-back of half a minute.
_YOUNG_NS = 60_000_000_000
# Number of trees remembered for commands without a run; the oldest goes.
_KEPT = 32


def default_path(root: Path) -> Path:
    """Returns the cache's path for a tree that belongs to no run: `$XDG_CACHE_HOME/verl-slurm/fingerprints/`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    # By the real path: the same tree by another link has the same cache, and any path makes a valid name.
    name = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:32]
    return Path(base) / "verl-slurm" / "fingerprints" / f"{name}.hashes"


def load(path: Path) -> tuple[dict[str, Hashed], str | None]:
    """Returns the cache, empty when none can be trusted, and the reason if it is worth a notice."""
    try:
        fd = open_regular(path)
        try:
            info = os.fstat(fd)
            # Whoever may write the cache decides which bytes are never read again.
            if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
                raise ValueError(f"mode {info.st_mode:o}, uid {info.st_uid}")
            return decode(read_fd(fd, _LIMIT)), None
        finally:
            os.close(fd)
    except FileNotFoundError:
        return {}, None
    except (ValueError, RecursionError, OSError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        return {}, f"the hash cache {path} is not used and made anew: {found}"


def save(path: Path, cache: Mapping[str, Hashed]) -> str | None:
    """Stores the cache; returns a failure instead of raising it, because it costs nothing but time."""
    try:
        data = encode(cache)
        # More than the next look would read: it would say at each one that the cache is damaged.
        check_json(data, _LIMIT)
        # A cache below RUN goes with the run; those of commands without one would pile up.
        if path.suffix == ".hashes":
            _make_room(private_dir(path.parent), path)
        write_file(path, data)
    except (OSError, VerlSlurmError) as error:
        return f"the hash cache {path} cannot be kept, the next look reads every file again: {error}"
    return None


def encode(cache: Mapping[str, Hashed]) -> bytes:
    """Returns the bytes of the file; pure."""
    body = msgspec.json.encode(cache)
    return _HEAD + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode(data: bytes) -> dict[str, Hashed]:
    """Reverses `encode`; pure. Raises ValueError or RecursionError for bytes that it did not make."""
    start = len(_HEAD) + _HEX + 1
    if data[: len(_HEAD)] != _HEAD:
        raise ValueError("another format")
    body = data[start:]
    if data[len(_HEAD) : start] != hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise ValueError("its digest is wrong")
    # Doubled keys cannot mislead another reader: there is none.
    return decode_json(body, dict[str, Hashed], _LIMIT, doubles=False)


def devices_with_ctime(root: Path, files: Mapping[str, ListedFile]) -> frozenset[int]:
    """Returns the numbers of the devices of these files whose ctime proves something."""
    examples = {file.device: path for path, file in files.items()}
    return frozenset(device for device, path in examples.items() if keeps_ctime(root / path))


def settled(
    root: Path,
    files: Mapping[str, ListedFile],
    hashed: Mapping[str, Hashed],
    read_now: Collection[str],
    began_ns: int,
) -> dict[str, Hashed]:
    """Selects the part of a look at a tree that may be cached.

    Args:
        files: all of it, by path.
        read_now: the paths that did not come from a cache.
        began_ns: the wall clock before the first file was read, in ns since 1970.
    """
    devices, before_ns = devices_with_ctime(root, files), began_ns - _YOUNG_NS
    return {
        path: hashed[path]
        for path, file in files.items()
        # From the cache: it was settled then, and its stamp is the same now.
        if path not in read_now
        # A write after the hashing began would have got another stamp. mtime counts, too: both are stamps, and one from
        # the future cannot be relied upon.
        or (max(file.stamp[2:]) < before_ns and file.device in devices)
    }


def _make_room(folder: Path, path: Path) -> None:
    others = [other for other in folder.glob("*.hashes") if other != path]
    # lstat: the names may be links, and nothing is followed here.
    others.sort(key=lambda other: other.lstat().st_mtime_ns)
    for other in others[: max(0, len(others) - _KEPT + 1)]:
        other.unlink(missing_ok=True)
