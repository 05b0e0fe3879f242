"""What ranks that stand by are told: which modules to import ahead, and at last their orders.

`RUN/control/imports` has a module's name in each line. Only installed modules are among them: the program's own are a
few lines, and importing them might do anything. `Orders` say what to become: one msgpack map through a pipe, ended by
the end of the pipe.
"""

import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import msgspec

from verl_slurm.base.bounded import Limit, TooMuch, read_regular
from verl_slurm.base.files import write_file
from verl_slurm.base.paths import RunPaths

_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_LIMIT = Limit(num_bytes=1 << 20)
_OURS = ("verl_slurm.", "verl_slurm_daemon.")
"""Installed or not: they are those of the daemon."""
_NEVER = ("mpi4py",)
"""Its import starts MPI."""


def remember_imports(paths: RunPaths) -> None:
    """Writes down what this process has imported. Never raises: without it ranks stand by with torch alone."""
    lines = "".join(f"{name}\n" for name in _installed(tuple(sys.modules.items())))
    with suppress(OSError):
        write_file(paths.imports, lines.encode()[: _LIMIT.num_bytes], durable=False)


def _installed(modules: tuple[tuple[str, ModuleType], ...]) -> Iterator[str]:
    places = tuple(
        sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    for name, module in modules:
        with suppress(Exception):  # a library may put anything there
            spec = module.__spec__
            installed = name.startswith(_OURS) or str(spec and spec.origin).startswith(places)
            if installed and spec is not None and spec.name == name and not name.startswith(_NEVER):
                yield name


def import_all(file: Path) -> None:
    """Imports what `remember_imports` wrote, as far as it can be imported; without a list, torch."""
    try:
        names = read_regular(file, _LIMIT).decode().splitlines()
    except (OSError, TooMuch, UnicodeDecodeError):
        names = ["torch"]
    for name in names:
        # What cannot be imported ahead is imported by the program, or fails there.
        if _NAME.fullmatch(name):
            with suppress(Exception):
                importlib.import_module(name)


class WatchedEnvironment:
    """Notes which variables are read in a `with` block, one by one, and what they were before."""

    def __init__(self) -> None:
        self._read: dict[str, str | None] = {}
        self._before: dict[str, str] = {}
        self._unread: list[str] = []
        """Of the variables that were just listed, those that were not read yet, the next one last."""
        self._in_turn: list[str] = []

    def __enter__(self) -> "WatchedEnvironment":
        listed, noted, kind = self._list, self._note, type(os.environ)

        class Watched(kind):  # type: ignore[valid-type, misc]
            def __iter__(self) -> Iterator[str]:
                names = list(super().__iter__())
                listed(names)
                return iter(names)

            def __getitem__(self, name: str) -> str:
                noted(name)
                value: str = super().__getitem__(name)
                return value

        self._before = dict(os.environ)
        self._kind = kind
        # The object stays the one that every module holds.
        os.environ.__class__ = Watched
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.__class__ = self._kind
        self._list([])

    def _list(self, names: list[str]) -> None:
        # Those before were read in turn, but not all: that may have been a search for one of them.
        for name in self._in_turn:
            self._count(name)
        self._unread, self._in_turn = names[::-1], []

    def _note(self, name: str) -> None:
        # In turn: that is how libraries look for those of their own prefix (tqdm, fsspec), and a rank's place
        # is always among them.
        if self._unread and self._unread[-1] == name:
            self._in_turn.append(self._unread.pop())
            if not self._unread:
                self._in_turn = []
            return
        self._list([])
        self._count(name)

    def _count(self, name: str) -> None:
        # As it was before: an import may set it, and read it afterwards.
        self._read.setdefault(name, self._before.get(name))

    def differing(self, environ: dict[str, str]) -> list[str]:
        """Lists the variables that were read and have another value in `environ`."""
        # A library may read its rank as it is imported (Lightning does). What was imported ahead holds for a
        # process alone whose variables have these values.
        return sorted(name for name, value in self._read.items() if environ.get(name) != value)


class Orders(msgspec.Struct, frozen=True):
    """What a rank, or the launcher of a node's ranks, is started with. As bytes, which need not be text."""

    argv: list[bytes]
    """The arguments of `verl_slurm.loops.rendezvous` or of `verl_slurm_daemon.agent.ranks`."""
    environ: list[bytes]
    """`NAME=VALUE`, all of them."""

    @classmethod
    def of(cls, argv: list[str], environ: dict[str, str]) -> "Orders":
        """Takes what `subprocess` would take."""
        return cls(
            [os.fsencode(word) for word in argv], [os.fsencode(f"{k}={v}") for k, v in environ.items()]
        )

    @classmethod
    def read(cls, data: bytes) -> "Orders":
        """Raises msgspec.DecodeError: not written by `encode`."""
        return msgspec.msgpack.decode(data, type=cls)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def words(self) -> list[str]:
        return [os.fsdecode(word) for word in self.argv]

    def variables(self) -> dict[str, str]:
        return dict(os.fsdecode(one).partition("=")[::2] for one in self.environ)
