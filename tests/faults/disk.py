"""A disk in memory, and what a crash may leave of it: the model that the crash-point enumeration rests on.

A recorded run is a list of operations on numbered nodes (a file or directory keeps its number when it is
renamed). A crash after the first k of them leaves some of them out. Which may be left out is what POSIX says:

* data written to a file is durable once that file was fsynced afterwards;
* a name made, renamed or removed is durable once the directory it is in was fsynced afterwards (both, for a
  rename from one to another); fsync of the file itself does not make its name durable;
* everything else is *pending*: it may be there or not, in any combination.

`crash_states` tries, for each k (the names are what a failing test prints):

| name | left out | such as |
|---|---|---|
| kill | nothing | kill -9, OOM: the page cache survives |
| torn | nothing, and half of write k + 1 is there | kill in a split write, a short write |
| strict | all that is pending | a power cut, the weakest file system POSIX allows |
| journal | pending data, and names younger than the last fsync of anything | ext4, XFS: one journal |
| names | pending data only | delayed allocation; an NFS or Lustre client that is evicted |
| without i | the pending operation i alone | reordering by the file system |
| only i | all that is pending but i | the same |
| some | a random half of what is pending | the same; in the exhaustive run only |

After Pillai et al., "All File Systems Are Not Created Equal: On the Complexity of Crafting Crash-Consistent
Applications", OSDI 2014. Not modelled: bad sectors (the verifier's tests have them), torn directory blocks.
"""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

Tree = dict[str, bytes | None]
"""Path → content; None: a directory."""


class Make(NamedTuple):
    """A new file or directory."""

    folder: int
    name: str
    node: int
    is_directory: bool


class Write(NamedTuple):
    node: int
    at: int
    data: bytes


class Truncate(NamedTuple):
    node: int
    size: int


class Rename(NamedTuple):
    folder: int
    name: str
    to_folder: int
    to_name: str
    node: int


class Remove(NamedTuple):
    folder: int
    name: str


class Sync(NamedTuple):
    node: int


class Ack(NamedTuple):
    """Not on the disk: here somebody was told that checkpoint `name` is safe."""

    name: str


Operation = Make | Write | Truncate | Rename | Remove | Sync | Ack


class CrashState(NamedTuple):
    """What a crash left.

    Attributes:
        after: operations that were issued.
        how: the row of the table above.
        acked: what had been promised by then.
    """

    after: int
    how: str
    tree: Tree
    acked: tuple[str, ...]


@dataclass
class Disk:
    """Directories and contents by node; node 0 is the root."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    contents: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path) -> "Disk":
        """What lies below `root` now, all of it taken as durable."""
        disk = cls()
        for folder, folders, files in os.walk(root):
            at = disk.find(os.path.relpath(folder, root))
            assert at is not None
            for name in sorted(folders + files):
                path = Path(folder, name)
                disk.apply(Make(at, name, disk.new_node(), path.is_dir()))
                if path.is_file():
                    disk.contents[disk.folders[at][name]] = path.read_bytes()
        return disk

    def copy(self) -> "Disk":
        return Disk({node: dict(names) for node, names in self.folders.items()}, dict(self.contents))

    def new_node(self) -> int:
        return len(self.folders) + len(self.contents)

    def find(self, path: str) -> int | None:
        """The node at `path`, relative to the root."""
        node: int | None = 0
        for name in path.split("/"):
            if name not in ("", "."):
                node = self.folders.get(node, {}).get(name) if node is not None else None
        return node

    def apply(self, op: Operation) -> None:
        """Carry out `op`, or as much of it as makes sense when something before it is missing."""
        match op:
            case Make(folder, name, node, is_directory):
                self.folders[folder][name] = node
                if is_directory:
                    self.folders[node] = {}
                else:
                    self.contents[node] = b""
            case Write(node, at, data):
                old = self.contents.get(node, b"").ljust(at, b"\0")
                self.contents[node] = old[:at] + data + old[at + len(data) :]
            case Truncate(node, size):
                self.contents[node] = self.contents.get(node, b"")[:size].ljust(size, b"\0")
            case Rename(folder, name, to_folder, to_name, node):
                if self.folders[folder].get(name) == node:
                    del self.folders[folder][name]
                    self.folders[to_folder][to_name] = node
            case Remove(folder, name):
                self.folders[folder].pop(name, None)
            case Sync() | Ack():
                pass

    def tree(self) -> Tree:
        """Everything that has a name."""
        found: Tree = {}

        def descend(folder: int, prefix: str) -> None:
            for name, node in self.folders[folder].items():
                if node in self.folders:
                    found[prefix + name] = None
                    descend(node, f"{prefix}{name}/")
                else:
                    found[prefix + name] = self.contents.get(node, b"")

        descend(0, "")
        return found


def pending(ops: Sequence[Operation]) -> list[int]:
    """Which of `ops` no fsync among them has made durable, as POSIX has it."""
    synced = {op.node: at for at, op in enumerate(ops) if isinstance(op, Sync)}
    found = []
    for at, op in enumerate(ops):
        match op:
            case Make(folder) | Remove(folder):
                needs = {folder}
            case Rename(folder, _, to_folder):
                needs = {folder, to_folder}
            case Write(node) | Truncate(node):
                needs = {node}
            case _:
                continue
        if any(synced.get(node, -1) < at for node in needs):
            found.append(at)
    return found


def crash_states(
    start: Disk, ops: Sequence[Operation], *, num_random: int = 0, seed: int = 0
) -> Iterator[CrashState]:
    """Every state of the table, for a crash before each operation and after the last; doubles included."""
    rng = random.Random(seed)
    for k in range(len(ops) + 1):
        acked = tuple(op.name for op in ops[:k] if isinstance(op, Ack))
        loose = pending(ops[:k])
        data = {at for at in loose if isinstance(ops[at], Write | Truncate)}
        last_sync = max((at for at, op in enumerate(ops[:k]) if isinstance(op, Sync)), default=-1)
        young = {at for at in loose if at > last_sync and at not in data}
        ways = {"kill": set(), "strict": set(loose), "journal": data | young, "names": data}
        for at in loose:
            ways[f"without {at}"] = {at}
            ways[f"only {at}"] = set(loose) - {at}
        for number in range(num_random):
            ways[f"some {number}"] = {at for at in loose if rng.random() < 0.5}
        for how, missing in ways.items():
            disk = _replay(start, ops[:k], missing)
            yield CrashState(k, how, disk.tree(), acked)
        if k < len(ops) and isinstance(torn := ops[k], Write) and len(torn.data) > 1:
            half = torn._replace(data=torn.data[: len(torn.data) // 2])
            yield CrashState(k, "torn", _replay(start, [*ops[:k], half], set()).tree(), acked)


def _replay(start: Disk, ops: Sequence[Operation], missing: set[int]) -> Disk:
    disk = start.copy()
    for at, op in enumerate(ops):
        if at not in missing:
            disk.apply(op)
        elif isinstance(op, Make):
            # Without a name, but not without a number: what is made below it must have somewhere to go.
            (disk.folders if op.is_directory else disk.contents).setdefault(
                op.node, {} if op.is_directory else b""
            )  # type: ignore[arg-type]
    return disk
