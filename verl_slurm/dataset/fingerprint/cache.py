"""Caches the hashes of a data set's files, so that an unchanged tree need not be read again.

```
verl-slurm hash cache 1 LF
SHA-256 (hex) of the rest LF
number of bytes of the lines LF
the lines, each with a NUL after it, in the order in which find(1) gave them
{"tree": ..., "whole": ..., "files": {...}, "devices": {...}}      JSON, see `_Body`
```

Mode 0600, at most 256 MiB. It can be removed at any time. The file is not trusted blindly: one that is not whole, not
ours or of another format is ignored and made anew, and a notice says so.

A line (see `walk`) is trusted on this ground: a file with the same path, device, inode, size, mtime and ctime has
the same content. ctime carries the argument: the kernel sets it at each write, at each change of mtime (so a forged
mtime is seen) and when an inode is made (so a reused inode number, on NFS or a local disk, is seen), and no program can
set it. Two kinds of files are therefore never cached, and read at each look:

* files on a file system for which this is not known (see `base.mounts`);
* files whose stamp was less than a minute old, or in the future, when the hashing began (git calls them racy). They
  could be written again without a new stamp: within the same clock tick (0.01 s), or second (2 s on old file systems),
  by the clock of a server that differs from ours, or through a mapping: a dirty page gets no new stamp until it was
  written back (half a minute, by the kernel's defaults).

Some changes remain that only reading everything (`--full`) can see: a clock set back, so that a later write gets the
earlier stamp; content changed below the file system (bad medium, restored image); writes through a mapping where pages
are not written back in that time (tmpfs, or `vm.dirty_expire_centisecs` raised); on NFS, a write of another node less
than `acregmax` ago (60 s), because `stat` answers from the node's own cache.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.mounts import Mount, mount_of, mounts
from verl_slurm.dataset.fingerprint.entries import FileDigest, Fingerprint
from verl_slurm.dataset.fingerprint.hashing import Digests
from verl_slurm.dataset.fingerprint.walk import Line, parse_line

MAX_BYTES = 256 << 20
_HEAD = b"verl-slurm hash cache 1\n"
_HEX = 64
_LEAST_LINE = 12
"""Average bytes: a file's line has a letter, device, inode, size, two times and a path; a directory's line has its
path."""
# Above each delay that the module names: a clock's tick, a second or two, the kernel's write-back of half a minute.
_YOUNG_NS = 60_000_000_000
# Number of trees remembered for commands without a run; the oldest goes.
_KEPT = 32


@dataclass(frozen=True, kw_only=True)
class HashCache:
    """A tree as of its last look."""

    fingerprint: Fingerprint
    text: bytes = b""
    """The lines that are trusted, each with a NUL after it."""
    whole: bool = False
    """The lines are complete: a tree with the very same lines has this fingerprint."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """Device number → name of the file system, for those that have one on every node."""

    def lines(self) -> list[str]:
        return self.text.decode("utf-8", "replace").split("\0")[:-1]

    def known(self) -> Digests:
        """Returns the hashes of the trusted lines."""
        found = {}
        for line in self.lines():
            with suppress(ValueError):
                entry = parse_line(line)
                if entry.kind == "directory":
                    continue
                digest = self.fingerprint.files.get(entry.path)
                # A line and its hash stand apart in the file, so they are held against each other.
                if digest and (digest.kind, digest.size) == (entry.kind, entry.size):
                    found[line] = digest.sha256
        return found


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tree: str
    whole: bool
    files: dict[str, FileDigest]
    devices: dict[str, str]


def default_path(root: Path) -> Path:
    """Returns the cache's path for a tree that belongs to no run: `$XDG_CACHE_HOME/verl-slurm/fingerprints/`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    # By the real path: the same tree by another link has the same cache, and any path makes a valid name.
    name = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:32]
    return Path(base) / "verl-slurm" / "fingerprints" / f"{name}.hashes"


def load(path: Path) -> tuple[HashCache | None, str | None]:
    """Returns the cache, or None when none can be trusted, and the reason if it is worth a notice."""
    try:
        # O_NONBLOCK: a FIFO in its place would block. What is checked below is the file that is read: one descriptor.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb", buffering=0) as file:
            info = os.fstat(fd)
            # Whoever may write the cache decides which bytes are never read again.
            private = info.st_uid == os.geteuid() and not stat.S_IMODE(info.st_mode) & 0o077
            if not stat.S_ISREG(info.st_mode) or not private or info.st_size > MAX_BYTES:
                raise ValueError(f"mode {info.st_mode:o}, uid {info.st_uid}, {info.st_size} bytes")
            # One byte more than it has: a file that grows meanwhile gets a wrong digest and is not used.
            data = file.read(info.st_size + 1)
        # Device numbers differ from node to node; the file systems' names do not.
        return here(decode(data), mounts()), None
    except FileNotFoundError:
        return None, None
    except (ValueError, OSError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        return None, f"the hash cache {path} is not used and made anew: {found}"


def save(path: Path, cache: HashCache) -> str | None:
    """Stores the cache; returns a failure instead of raising it, because it costs nothing but time."""
    try:
        data = encode(cache)
        if len(data) > MAX_BYTES:
            raise OSError(errno.EFBIG, f"{len(data)} bytes, at most {MAX_BYTES}")
        # A cache below RUN goes with the run; those of commands without one would pile up.
        if path.suffix == ".hashes":
            _make_room(private_dir(path.parent), path)
        write_file(path, data)
    except (OSError, VerlSlurmError) as error:
        return f"the hash cache {path} cannot be kept, the next look reads every file again: {error}"
    return None


def encode(cache: HashCache) -> bytes:
    """Returns the bytes of the file; pure."""
    found = cache.fingerprint
    body = msgspec.json.encode(
        _Body(
            tree=found.digest,
            whole=cache.whole,
            files=found.files,
            devices=dict(cache.devices),
        )
    )
    rest = b"%d\n%b%b" % (len(cache.text), cache.text, body)
    return _HEAD + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def decode(data: bytes) -> HashCache:
    """Reverses `encode`; pure.

    Raises:
        ValueError: the bytes are not what `encode` made.
    """
    start = len(_HEAD) + _HEX + 1
    if data[: len(_HEAD)] != _HEAD:
        raise ValueError("another format")
    # A view: the file may have 256 MiB, and each slice of bytes would copy them.
    rest = memoryview(data)[start:]
    if data[len(_HEAD) : start] != hashlib.sha256(rest).hexdigest().encode() + b"\n":
        raise ValueError("its digest is wrong")
    length, newline, _ = bytes(rest[:20]).partition(b"\n")
    if not newline or not length.isdigit():
        raise ValueError("no length")
    begin = len(length) + 1
    end = begin + int(length)
    text = bytes(rest[begin:end])
    # Checked before the lines are split: a file of NULs alone would take fifty times its size in memory.
    if text.count(b"\0") > len(text) // _LEAST_LINE:
        raise ValueError("lines that are too short")  # each becomes a string of 50 bytes and more
    try:
        found = msgspec.json.decode(rest[end:], type=_Body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
    tree = Fingerprint(digest=found.tree, files=found.files)
    return HashCache(fingerprint=tree, text=text, whole=found.whole, devices=found.devices)


def here(cache: HashCache, mounted: Mapping[int, Mount]) -> HashCache:
    """Returns `cache` with the device numbers of this node, if another node wrote it; pure."""
    numbers: dict[str, set[int]] = {}
    for number, mount in mounted.items():
        if mount.name is not None:
            numbers.setdefault(mount.name, set()).add(number)
    renamed = {}
    for old, name in cache.devices.items():
        now = numbers.get(name, set())
        # Mounted twice, under two numbers: either may be meant, so neither is used.
        if len(now) == 1 and old != str(min(now)):
            renamed[old] = str(min(now))
    if not renamed:
        return cache
    lines = []
    for line in cache.lines():
        words = line.split(" ", 2)
        if len(words) == 3 and words[0] != "d" and words[1] in renamed:
            line = f"{words[0]} {renamed[words[1]]} {words[2]}"
        lines.append(line)
    devices = {renamed.get(old, old): name for old, name in cache.devices.items()}
    return replace(cache, text=text_of(lines), devices=devices)


def settled(
    root: Path, found: Fingerprint, lines: Sequence[str], trusted: Collection[str], began_ns: int
) -> HashCache:
    """Selects the part of a look at a tree that may be cached.

    Args:
        root: of the tree.
        lines: of the whole tree, as it was hashed.
        trusted: those taken from a cache before.
        began_ns: the wall clock before the first file was read, in ns since 1970.
    """
    mounted: dict[int, Mount | None] = dict(mounts())
    devices = {}
    kept = []
    for line in lines:
        entry = parse_line(line)
        if entry.kind == "directory":
            kept.append(line)
            continue
        if entry.device not in mounted:
            mounted[entry.device] = mount_of(root / entry.path)
        mount = mounted[entry.device]
        # Trusted before: it was settled then, and its stamp is the same now.
        if line in trusted or is_settled(entry, mount, began_ns):
            kept.append(line)
            if mount is not None and mount.name is not None:
                devices[str(entry.device)] = mount.name
    # Not whole, the cache still spares the files that it has; the rest is read at each look.
    return HashCache(fingerprint=found, text=text_of(kept), whole=len(kept) == len(lines), devices=devices)


def text_of(lines: Iterable[str]) -> bytes:
    """Returns lines as the cache and find(1) write them; pure."""
    return "".join([line + "\0" for line in lines]).encode()


def is_settled(entry: Line, mount: Mount | None, began_ns: int) -> bool:
    """Returns whether a write after the hashing began would have got another stamp. Pure; see the module."""
    # mtime too: both are stamps, and one from the future cannot be relied upon.
    return (
        mount is not None and mount.keeps_ctime and max(entry.mtime_ns, entry.ctime_ns) + _YOUNG_NS < began_ns
    )


def _make_room(folder: Path, path: Path) -> None:
    others = [other for other in folder.glob("*.hashes") if other != path]
    # lstat: the names may be links, and nothing is followed here.
    others.sort(key=lambda other: other.lstat().st_mtime_ns)
    for other in others[: max(0, len(others) - _KEPT + 1)]:
        other.unlink(missing_ok=True)
