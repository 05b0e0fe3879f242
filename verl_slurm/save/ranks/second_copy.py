"""The nodes' own disks as one medium of a save: committed as soon as every node has its part, whoever else is slow.

What shared storage does meanwhile is not waited for: this side has a thread and a conversation of its own on every
rank. So whatever strikes while shared storage is still being written (a deadline, a SIGKILL) costs nothing.
`checkpoint/store/local_copy.py` specifies what lies there and how it comes home.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.checkpoint.format.manifest import parse, render
from verl_slurm.checkpoint.format.specification import FileEntry, Manifest
from verl_slurm.checkpoint.store.local_copy import (
    LocalPart,
    commit_part,
    drop_staging,
    part_problems,
    prune_parts,
)
from verl_slurm.save.ranks.attempt import Attempt, LocalPlace, SavedCheckpoint
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.medium_results import Small, write_side
from verl_slurm.save.writer.media import Medium

__all__ = ["Kept", "SecondCopy"]


class _Word(msgspec.Struct, frozen=True):
    """What each rank says of its node's part."""

    problem: str = ""
    unneeded: bool = False
    """Shared storage has it: nobody needs to read the part back. Rank 0's counts."""


class Kept:
    """What became of one save on the nodes' disks; the same on every rank, but for `part`.

    Attributes:
        num_bytes: of the whole checkpoint, over all ranks.
        problem: why not every node has its part; empty: all have.
        part: this node's, on the rank that committed it.
        read_back: what was found wrong with the parts on their disks, where somebody wants to know.
    """

    def __init__(self, problem: str, num_bytes: int = 0, part: LocalPart | None = None) -> None:
        self.problem, self.num_bytes, self.part = problem, num_bytes, part
        self.read_back: Future[str] | None = None


class SecondCopy:
    """Saves to the nodes' disks. Collective; made on the main thread of every rank."""

    def __init__(self, ranks: Collective, place: LocalPlace) -> None:
        self._ranks, self._place = ranks.another(), place
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="second-copy")

    def begin(
        self,
        attempt: Attempt,
        directory: Path,
        small: "Future[Small]",
        manifest: Callable[[list[FileEntry]], Manifest],
    ) -> "Future[Kept]":
        """Have it written, and committed when every rank's part is durable; returns at once.

        Args:
            directory: this rank's staging directory.
            manifest: rank 0's, sealed, of these entries.

        Returns:
            Once it is committed or has failed. It raises `RanksFailed`.
        """
        done: Future[Kept] = Future()

        def work() -> None:
            try:
                kept, unneeded = self._commit(attempt, directory, small, manifest)
                if attempt.on_kept is not None and not kept.problem and not unneeded:
                    kept.read_back = Future()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                done.set_exception(error)
                return
            done.set_result(kept)
            if kept.read_back is None:
                return
            try:
                problem = self._read_back(kept)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                kept.read_back.set_exception(error)
                return
            kept.read_back.set_result(problem)
            self._tell(attempt, kept, problem)

        self._thread.submit(work)
        return done

    def read_back(self, kept: Kept) -> str:
        """What is wrong with the parts of all nodes, every byte of them read; those that are damaged go. Collective."""
        found = kept.read_back or self._thread.submit(self._read_back, kept)
        return found.result()

    def prune(self) -> None:
        """Remove older parts, once the newest is known to be good or not to be needed."""
        if self._place.is_first:
            with suppress(OSError):
                prune_parts(self._place.directory, self._place.keep)

    def drop(self, staging_name: str) -> None:
        """Remove what a failed save left. A part that was committed stays: it is whole, and perhaps all there is."""
        if self._place.is_first:
            drop_staging(self._place.directory / staging_name)

    def close(self) -> None:
        """Let what is under way come to its end."""
        self._thread.shutdown()

    def _commit(
        self,
        attempt: Attempt,
        directory: Path,
        small: "Future[Small]",
        manifest: Callable[[list[FileEntry]], Manifest],
    ) -> tuple[Kept, bool]:
        side = write_side(
            self._ranks, directory, small, attempt.answers[Medium.LOCAL], on_part=attempt.on_part
        )
        if side.problem:
            return Kept(side.problem), True
        whole = parse(
            self._ranks.on_first("committing the second copy", lambda: render(manifest(side.entries))),
            where=directory,
        )
        part, problem = None, ""
        if self._place.is_first:
            try:
                part = commit_part(directory, whole)
            except (OSError, VerlSlurmError) as error:
                problem = f"{type(error).__name__}: {error}"
        words = self._gather(_Word(problem, attempt.on_shared.is_set()))
        return Kept(_found(words), whole.num_bytes, part), words[0].unneeded

    def _read_back(self, kept: Kept) -> str:
        problem = ""
        if kept.part is not None:
            try:
                problem = "; ".join(part_problems(kept.part)[:3])
                if problem:
                    drop_staging(kept.part.path)
            except (OSError, VerlSlurmError) as error:
                problem = f"{type(error).__name__}: {error}"
        return _found(self._gather(_Word(problem)))

    def _tell(self, attempt: Attempt, kept: Kept, problem: str) -> None:
        if problem or attempt.on_kept is None or attempt.on_shared.is_set():
            return
        runtime = attempt.contents.runtime
        attempt.on_kept(
            SavedCheckpoint(
                name=attempt.paths.checkpoint(runtime.step, runtime.safe_point).name,
                seconds=time.monotonic() - attempt.started,
                num_bytes=kept.num_bytes,
                on_shared=False,
                problem=f"not on {Medium.SHARED}: it was still being written",
            )
        )

    def _gather(self, word: _Word) -> list[_Word]:
        return [
            msgspec.msgpack.decode(part, type=_Word)
            for part in self._ranks.gather(msgspec.msgpack.encode(word))
        ]


def _found(words: list[_Word]) -> str:
    return "; ".join(f"rank {rank}: {word.problem}" for rank, word in enumerate(words) if word.problem)[:500]
