"""Looks over the shoulder of the real code: each call that changes a disk is recorded, and may be made to fail.

`Tracer` replaces the functions of `os`, and Python's `open`, while it is entered. Only what happens below its
root in this process counts; so the saver is brought into the process (`InProcess`), with the very function that
the saver process calls. That nothing slips through is checked: `recorded` compares what its record leads to with
what really lies there, byte by byte, and calls that the model does not know are refused.
"""

import builtins
import errno
import io
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tests.faults.disk import Ack, Disk, Make, Operation, Remove, Rename, Sync, Truncate, Write
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.save.writer import protocol
from verl_slurm.save.writer.arena import Arena
from verl_slurm.save.writer.writing import write_and_hash

_NONCE = re.compile(r"\.[0-9a-f]{8,}(?=\.)")
_STEP = re.compile(r"step_\d+")
_UNKNOWN = (
    "link",
    "symlink",
    "truncate",
    "writev",
    "pwritev",
    "copy_file_range",
    "posix_fallocate",
    "mkfifo",
)
_REMOVES = ("unlink", "remove", "rmdir")


class Call(NamedTuple):
    """One call that changes a disk, named so that the next run of the same thing has it, too.

    Attributes:
        path: below the root, without step numbers and nonces.
        nth: of those that are alike otherwise, from 1.
    """

    name: str
    path: str
    nth: int

    def __str__(self) -> str:
        return f"{self.name} {self.path} #{self.nth}"


@dataclass(frozen=True)
class Fault:
    """`call` fails with `number`; with `for_ever`, so does all that follows on the same medium.

    A full disk still lets go of what it has; a broken one does not. Number 0: a write takes half of what it is given.
    """

    call: Call
    number: int
    for_ever: bool

    def __str__(self) -> str:
        return f"{errno.errorcode.get(self.number, 'short')} {'from' if self.for_ever else 'at'} {self.call}"


class InProcess:
    """Stands in for `save.writer.handle.SaverProcess`: the same work by the same function, in this process."""

    pid = 0

    def __init__(self, arena: Arena, *, hashers: int = 1, encryption: EncryptionConfig | None = None) -> None:
        assert encryption is None
        self._arena = arena

    def wait_ready(self) -> None:
        """It is."""

    def write(
        self, request: protocol.Write, on_done: Callable[[protocol.Written], None] = lambda _: None
    ) -> tuple[protocol.Written, ...]:
        assert request.sealing is None
        _, answers = write_and_hash(self._arena.view, request.files, request.directories, on_done=on_done)
        return answers

    def close(self) -> None:
        """There is nothing to end."""


class Tracer:
    """Records, and fails what `fault` says, while it is entered.

    Attributes:
        ops: what changed, in order.
        calls: each call that may be made to fail.
        hits: how many were.
    """

    def __init__(self, root: Path, fault: Fault | None = None) -> None:
        self.root, self.fault = os.path.realpath(root), fault
        self.start = Disk.of(root)
        self.ops: list[Operation] = []
        self.calls: list[Call] = []
        self.hits = 0
        self._now = self.start.copy()
        self._seen: Counter[tuple[str, str]] = Counter()
        self._lock = threading.RLock()
        self._real: dict[str, Any] = {}
        self._open = io.open

    def ack(self, name: str) -> None:
        """Somebody is told that `name` is safe."""
        self.ops.append(Ack(name))

    def recorded(self) -> list[Operation]:
        """The record, once it is known to be whole."""
        assert self._now.tree() == Disk.of(Path(self.root)).tree(), "something wrote unseen"
        return self.ops

    def __enter__(self) -> "Tracer":
        ours: dict[str, Callable[..., Any]] = {
            "open": self._os_open,
            "write": self._write,
            "pwrite": self._pwrite,
            "ftruncate": self._ftruncate,
            "sendfile": self._sendfile,
            "fsync": self._fsync,
            "fdatasync": self._fsync,
            "mkdir": self._mkdir,
            "rename": self._rename,
            "replace": self._rename,
        }
        ours |= {name: self._remover(name) for name in _REMOVES}
        ours |= {name: self._refuser(name) for name in _UNKNOWN}
        for name, function in ours.items():
            self._real[name] = getattr(os, name)
            setattr(os, name, function)
        builtins.open = io.open = self._py_open  # type: ignore[assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, function in self._real.items():
            setattr(os, name, function)
        builtins.open = io.open = self._open

    def _below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """`path` relative to the root; None: it is elsewhere, or has no name any more."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        text = os.path.normpath(os.path.join(os.getcwd(), text))
        if text == self.root:
            return "."
        return text[len(self.root) + 1 :] if text.startswith(self.root + "/") else None

    def _may(self, name: str, path: str) -> bool:
        """Counts a call, and raises where it is to fail; whether it is to do all it was asked for."""
        label = _STEP.sub("step", _NONCE.sub("", path))
        self._seen[name, label] += 1
        call = Call(name, label, self._seen[name, label])
        self.calls.append(call)
        fault = self.fault
        if fault is None:
            return True
        again = self.hits and fault.for_ever and path.split("/")[0] == fault.call.path.split("/")[0]
        if call == fault.call or (again and not (fault.number == errno.ENOSPC and name in _REMOVES)):
            self.hits += 1
            if not fault.number:
                return False
            raise OSError(fault.number, os.strerror(fault.number), path)
        return True

    def _note(self, op: Operation) -> None:
        self.ops.append(op)
        self._now.apply(op)

    def _split(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        node = self._now.find(folder)
        assert node is not None, f"the folder of {path} was made unseen"
        return node, name

    def _make(self, path: str, is_directory: bool) -> None:
        self._note(Make(*self._split(path), self._now.new_node(), is_directory))

    def _node(self, path: str) -> int:
        node = self._now.find(path)
        assert node is not None, f"{path} was made unseen"
        return node

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where = self._below(path, dir_fd)
        if where is None or not flags & (os.O_CREAT | os.O_TRUNC):
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)
        with self._lock:
            is_new = self._now.find(where) is None
            self._may("open", where)
            fd: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            if is_new:
                self._make(where, False)
            elif flags & os.O_TRUNC:
                self._note(Truncate(self._node(where), 0))
            return fd

    def _py_open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+") or self._below(file) is None:
            return self._open(file, mode, *args, **kwargs)
        assert mode in ("wb", "w"), f"open(..., {mode!r}) is not modelled"
        raw = io.BufferedWriter(
            _Raw(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
        )
        return raw if mode == "wb" else io.TextIOWrapper(raw, encoding="utf-8")

    def _written(self, fd: int, act: Callable[[Any], int], data: Any, at: int | None) -> int:
        where = self._below(fd)
        if where is None:
            return act(data)
        with self._lock:
            if not self._may("write", where):
                data = data[: max(1, len(data) // 2)]
            if at is None:
                at = os.lseek(fd, 0, os.SEEK_CUR)
            count = act(data)
            self._note(Write(self._node(where), at, bytes(data[:count])))
            return count

    def _write(self, fd: int, data: Any) -> int:
        return self._written(fd, lambda part: self._real["write"](fd, part), data, None)

    def _pwrite(self, fd: int, data: Any, at: int) -> int:
        return self._written(fd, lambda part: self._real["pwrite"](fd, part, at), data, at)

    def _sendfile(self, out: int, source: int, offset: int, count: int) -> int:
        def act(part: bytes) -> int:
            return self._real["sendfile"](out, source, offset, len(part))

        return self._written(out, act, os.pread(source, count, offset), None)

    def _ftruncate(self, fd: int, size: int) -> None:
        where = self._below(fd)
        if where is None:
            return self._real["ftruncate"](fd, size)
        with self._lock:
            self._may("truncate", where)
            self._real["ftruncate"](fd, size)
            self._note(Truncate(self._node(where), size))

    def _fsync(self, fd: int) -> None:
        where = self._below(fd)
        if where is None:
            return self._real["fsync"](fd)
        with self._lock:
            self._may("fsync", where)
            # The model keeps what is durable; the real disk need not be waited for.
            self._note(Sync(self._node(where)))

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        where = self._below(path, dir_fd)
        if where is None:
            return self._real["mkdir"](path, mode, dir_fd=dir_fd)
        with self._lock:
            if self._now.find(where) is None:
                self._may("mkdir", where)
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            self._make(where, True)

    def _rename(
        self, source: Any, to: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        old, new = self._below(source, src_dir_fd), self._below(to, dst_dir_fd)
        if old is None and new is None:
            return self._real["rename"](source, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        assert old is not None
        assert new is not None
        with self._lock:
            self._may("rename", new)
            self._real["rename"](source, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            self._note(Rename(*self._split(old), *self._split(new), self._node(old)))

    def _remover(self, name: str) -> Callable[..., None]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            where = self._below(path, dir_fd)
            if where is None:
                return self._real[name](path, dir_fd=dir_fd)
            with self._lock:
                if self._now.find(where) is not None:
                    self._may(name, where)
                self._real[name](path, dir_fd=dir_fd)
                self._note(Remove(*self._split(where)))

        return remove

    def _refuser(self, name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            paths = [self._below(a) for a in args if isinstance(a, str | bytes | os.PathLike)]
            fds = [self._below(a) for a in args[:1] if isinstance(a, int)]
            assert not any([*paths, *fds]), f"os.{name} is not modelled"
            return self._real[name](*args, **kwargs)

        return refuse


class _Raw(io.RawIOBase):
    """A file that is open for writing; its writes are os.write, which is watched."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.name = os.readlink(f"/proc/self/fd/{fd}")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)
