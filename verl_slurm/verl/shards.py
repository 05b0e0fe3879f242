"""Checks that a `global_step_N` of verl is whole. Reads every byte; unpickles nothing, and needs no digest of ours.

The limits of the check:

* every rank's shards are there (`step_layout`), and all records have the CRC-32 that torch.save wrote (`torch_zip`);
* JSON parses, `fsdp_config.json` has the number of ranks that the shards have, safetensors are as long as they say;
* the rest (a tokenizer's other files, pickles of verl's transfer queue) has no checksum: it is named in `unchecked`.

A pickle is a program, and verl runs it (`torch.load(weights_only=False)`). So files that others own or may write are
not called good. Links are not followed.
"""

import codecs
import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import Limit, TooMuch, read_fd
from verl_slurm.base.errors import UNREADABLE
from verl_slurm.base.files import num_threads
from verl_slurm.base.one_line import printable
from verl_slurm.base.tree import Entry, list_tree, open_below, open_directory
from verl_slurm.checkpoint.format.info import Problem, ProblemKind
from verl_slurm.checkpoint.format.specification import MAX_FILES, path_problem
from verl_slurm.export.safetensors_file import safetensors_problem
from verl_slurm.verl.step_layout import StepLayout, missing_beside, read_layout, step_of
from verl_slurm.verl.torch_zip import zip_problem

OnBytes = Callable[[int], None]
Identity = tuple[int, int, int, int, int]
"""Device, inode, size, mtime_ns, ctime_ns: the same numbers are the same file with the same bytes."""

_MAX_JSON = Limit(num_bytes=64 << 20)
"""The largest tokenizer.json files are some 35 MB."""
_MAX_CONFIG = Limit(num_bytes=64 << 10)
"""fsdp_config.json: two numbers."""
_BLOCK = 1 << 20
_LARGE = 256 << 10
"""Bytes of JSON above which files take turns: threads would need the memory of all of them at once."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The verdict on one step's directory.

    Attributes:
        files: (path, size) of its regular files, sorted.
        problems: all findings, by path; text from the disk is escaped. Empty: it is whole.
        unchecked: files whose content cannot be checked against anything.
        identities: of each file that was judged, by its path. Names may lead to other files afterwards.
    """

    step: int
    path: Path
    layout: StepLayout
    files: tuple[tuple[str, int], ...]
    problems: tuple[Problem, ...]
    unchecked: tuple[str, ...] = ()
    identities: Mapping[str, Identity] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def world_size(self) -> int | None:
        return self.layout.world_size

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.files)

    def one_line(self, limit: int = 3) -> str:
        """Returns `global_step_6: whole, 2 ranks`, or the first problems."""
        if self.ok:
            return f"{self.name}: whole, {self.world_size} ranks"
        text = "; ".join(str(problem) for problem in self.problems[:limit])
        more = len(self.problems) - limit
        return f"{self.name}: {text}" + (f"; and {more} more" if more > 0 else "")


def list_steps(directory: Path) -> list[Path]:
    """Lists the `global_step_N` in `directory`, of any file type, newest first. Raises OSError."""
    # By number, not by name: verl writes no leading zeros.
    found = [(step, name) for name in os.listdir(directory) if (step := step_of(name)) is not None]
    return [directory / name for _, name in sorted(found, reverse=True)]


def step_bytes(path: Path) -> int:
    """Returns the bytes that reading a step takes, for a progress bar; 0 if unknown."""
    try:
        with open_directory(path) as root:
            return sum(entry.info.st_size for entry in list_tree(root, MAX_FILES) if entry.kind == "file")
    except (OSError, TooMuch):
        return 0


def judge_all(directory: Path, *, on_bytes: OnBytes = lambda _: None) -> list[Judged]:
    """Judges every step of one directory of verl, newest first, each also beside its neighbours. Raises OSError.

    Args:
        on_bytes: told how many more bytes were read; one call at a time.
    """
    # All of them first: what a step lacks altogether shows beside its neighbours alone.
    found = [judge_step(path, on_bytes=on_bytes) for path in list_steps(directory)]
    judged = []
    for one in found:
        others = [(other.name, other.layout) for other in found if other is not one]
        more = missing_beside(one.layout, others) if one.layout.entry != "other" else []
        judged.append(replace(one, problems=_sorted([*one.problems, *more])))
    return judged


def judge_step(path: Path, *, on_bytes: OnBytes = lambda _: None) -> Judged:
    """Judges one `global_step_N`. Never raises for what it finds there, nor for missing files."""
    step = step_of(path.name)
    if step is None:
        raise ValueError(f"{path.name!r} is no global_step_N")
    # `lock` keeps the calls of `on_bytes` apart; `turn` lets one large directory or text be in memory at a time.
    lock, turn, unchecked = threading.Lock(), threading.Lock(), list[str]()

    def count(num_bytes: int) -> None:
        with lock:
            on_bytes(num_bytes)

    try:
        with open_directory(path) as root:
            # The step's own directory is judged like what is in it: who may write there can exchange the files.
            here = Entry(path=".", info=os.fstat(root))
            entries = list_tree(root, MAX_FILES)
            files = [entry for entry in entries if entry.kind == "file"]
            untrusted = _untrusted([here, *entries])
            layout = read_layout([entry.path for entry in files])
            # By owner, kind and name before any content: all of it is known without opening a file.
            problems = untrusted + _odd(entries) + list(layout.problems)
            look = partial(_check_file, root, layout=layout, unchecked=unchecked, count=count, turn=turn)
            # Threads are enough: reading and CRC release the interpreter lock.
            with ThreadPoolExecutor(max_workers=num_threads(), thread_name_prefix="judge") as pool:
                # Of an untrusted step none is adopted, so none is read: its content is another user's choice.
                for found in pool.map(look, [] if untrusted else files):
                    problems += found
            if untrusted:
                unchecked += [entry.path for entry in files]
    except OSError as error:
        layout, files = read_layout([]), []
        what = "is a link, and those are not followed"
        problems = [Problem(path=".", what=what) if path.is_symlink() else _os_problem(".", error)]
    # Refused unread: a directory of millions of names would take memory and hours before it is found wanting.
    except TooMuch as error:
        layout, files = read_layout([]), []
        problems = [Problem(path=".", what=f"{error}, which no checkpoint of ours can hold")]
    return Judged(
        step=step,
        path=path,
        layout=layout,
        files=tuple((entry.path, entry.info.st_size) for entry in files),
        problems=_sorted(problems),
        unchecked=tuple(sorted(unchecked)),
        identities={entry.path: identity_of(entry.info) for entry in files},
    )


def identity_of(info: os.stat_result) -> Identity:
    """Returns the fields that distinguish a file, and this state of it, from others."""
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def trust_problem(info: os.stat_result) -> str:
    """Returns why other users control the content of this file or directory; empty: they do not."""
    if info.st_uid not in {0, os.geteuid()}:
        return f"belongs to uid {info.st_uid}, and verl would run the pickle in it as you"
    if stat.S_IMODE(info.st_mode) & 0o022:
        return f"may be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return ""


def _sorted(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    # Names come from the disk and go to terminals. A set, because one file may be found wrong twice over.
    shown = {Problem(path=printable(p.path), what=printable(p.what), kind=p.kind) for p in problems}
    return tuple(sorted(shown, key=lambda problem: (problem.path, problem.what)))


def _untrusted(entries: Sequence[Entry]) -> list[Problem]:
    # A link's own mode says nothing; links are refused by `_odd`.
    found = [(entry.path, trust_problem(entry.info)) for entry in entries if entry.kind != "link"]
    return [Problem(path=path, what=what, kind="untrusted") for path, what in found if what]


def _odd(entries: Sequence[Entry]) -> list[Problem]:
    """Lists entries that are neither file nor directory, and names that no checkpoint of ours can hold."""
    problems = []
    for entry in entries:
        if entry.kind not in ("file", "directory"):
            problems.append(Problem(path=entry.path, what=f"is a {entry.kind}, and those are not followed"))
        elif complaint := path_problem(f"global_step_0/{entry.path}"):
            problems.append(Problem(path=entry.path, what=complaint))
    return problems


def _check_file(
    root: int, entry: Entry, *, layout: StepLayout, unchecked: list[str], count: OnBytes, turn: threading.Lock
) -> list[Problem]:
    path = entry.path
    try:
        # Below the open directory and without links: a directory that is exchanged meanwhile leads to no other files.
        with open_below(root, path) as fd:
            if identity_of(os.fstat(fd)) != identity_of(entry.info):
                # The owner was that of the listed file, and the bytes would be another's.
                return [Problem(path=path, what="changed while it was judged")]
            # to read the medium's bytes, not those of a cache
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if path.endswith(".pt"):
                what = zip_problem(fd, count, turn=turn)
            elif path.endswith(".json"):
                with turn if entry.info.st_size > _LARGE else nullcontext():
                    what = _json_problem(fd, path, layout)
            elif path.endswith(".safetensors"):
                with turn:
                    what = safetensors_problem(fd)
                unchecked.append(path)
            else:
                # No pickle has no bytes at all; other files, such as markers, may be empty.
                what = "empty: 0 bytes" if path.endswith(".pkl") and not entry.info.st_size else ""
                unchecked.append(path)
    except OSError as error:
        return [_os_problem(path, error)]
    return [Problem(path=path, what=what)] if what else []


def _json_problem(fd: int, path: str, layout: StepLayout) -> str:
    shape = path.rsplit("/", 1)[-1] == "fsdp_config.json"
    try:
        data = read_fd(fd, _MAX_CONFIG if shape else _MAX_JSON)
        # Raw: checks that it parses, without making an object of it.
        msgspec.json.decode(data, type=msgspec.Raw)
        # msgspec leaves the bytes of texts that it does not decode unchecked, and JSON has to be UTF-8.
        _require_utf8(data)
        said = msgspec.json.decode(data, type=_Shape).world_size if shape else None
    except UNREADABLE as error:
        return f"not JSON: {error}"
    # verl's merger believes this file, and reads that many shards.
    if shape and layout.world_size is not None and said != layout.world_size:
        return f"says world_size {said}, the shards are of {layout.world_size}"
    return ""


class _Shape(msgspec.Struct):
    world_size: object = None


def _require_utf8(data: bytes) -> None:
    """Decodes a block at a time: text may take four times its bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(data)
    for at in range(0, len(data), _BLOCK):
        decoder.decode(view[at : at + _BLOCK])
    decoder.decode(b"", final=True)


def _os_problem(path: str, error: OSError) -> Problem:
    kind: ProblemKind = "unreadable"
    # Any other error may pass with the storage, and does not say that the bytes are bad.
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        kind = "damaged"
    return Problem(path=path, what=f"cannot be read: {error.strerror or error}", kind=kind)
