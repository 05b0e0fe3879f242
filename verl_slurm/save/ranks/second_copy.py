"""Saves to the nodes' own disks: committed as soon as every node has its part.

This medium has a thread and a process group of its own on every rank, so it does not wait for shared storage. A
deadline or a SIGKILL that comes while shared storage is still being written costs nothing.
`checkpoint/store/local_copy.py` specifies the files and how they are brought home.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.checkpoint.format.manifest import parse, render
from verl_slurm.checkpoint.format.specification import FileEntry, Manifest
from verl_slurm.checkpoint.store.local_copy import (
    commit_part,
    drop_staging,
    part_problems,
    prune_parts,
)
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.medium_results import write_to_medium
from verl_slurm.save.ranks.pending_save import LocalPlace, Medium, MediumResult, PendingSave, problems_of

__all__ = ["SecondCopy"]


class _PartReport(msgspec.Struct, frozen=True):
    """Each rank's report about its node's part; the ranks gather it."""

    problem: str = ""
    unneeded: bool = False
    """Shared storage has the checkpoint: the part need not be read back. Rank 0's counts."""


class SecondCopy:
    """Saves to the nodes' disks. Collective; made on the main thread of every rank."""

    def __init__(self, ranks: Collective, place: LocalPlace) -> None:
        self._ranks, self._place = ranks.another(), place
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="second-copy")

    def begin(
        self, save: PendingSave, manifest: Callable[[tuple[FileEntry, ...]], Manifest]
    ) -> "Future[MediumResult]":
        """Write the save, and commit it when every rank's part is durable; returns at once.

        Args:
            manifest: rank 0's, sealed, of these entries. Called from the thread "second-copy".

        Returns:
            Done once it is committed or has failed. It raises `RanksFailed`.
        """
        done: Future[MediumResult] = Future()

        def work() -> None:
            try:
                result, unneeded = self._commit(save, manifest)
                if save.on_kept is not None and not result.problem and not unneeded:
                    save.read_back = Future()
            except BaseException as error:  # noqa: BLE001 - raised where `done` is read
                done.set_exception(error)
                return
            done.set_result(result)
            if save.read_back is None:
                return
            try:
                problem = self._read_back(save)
            except BaseException as error:  # noqa: BLE001 - raised where `read_back` is read
                save.read_back.set_exception(error)
                return
            save.read_back.set_result(problem)
            self._tell(save, result, problem)

        self._thread.submit(work)
        return done

    def read_back(self, save: PendingSave) -> str:
        """Read every byte of all nodes' parts; returns what is wrong, and removes damaged parts. Collective.

        After the future of `begin` is done.
        """
        found = save.read_back or self._thread.submit(self._read_back, save)
        return found.result()

    def prune(self) -> None:
        """Remove older parts, once the newest is known to be good or not to be needed."""
        if self._place.is_first:
            with suppress(OSError):
                prune_parts(self._place.directory, self._place.keep)

    def drop(self, staging: Path) -> None:
        """Remove the remains of a failed save. A committed part stays: it is whole, and may be the last copy."""
        if self._place.is_first:
            drop_staging(staging)

    def close(self) -> None:
        """Wait for saves under way."""
        self._thread.shutdown()

    def _commit(
        self, save: PendingSave, manifest: Callable[[tuple[FileEntry, ...]], Manifest]
    ) -> tuple[MediumResult, bool]:
        """The result, and whether reading the parts back is not needed."""
        directory = save.directories[Medium.LOCAL]
        result = write_to_medium(self._ranks, save, Medium.LOCAL)
        if result.problem:
            return result, True
        whole = parse(
            self._ranks.on_first("committing the second copy", lambda: render(manifest(result.entries))),
            where=directory,
        )
        problem = ""
        if self._place.is_first:
            try:
                save.part = commit_part(directory, whole)
            except (OSError, VerlSlurmError) as error:
                problem = f"{type(error).__name__}: {error}"
        reports = self._gather(_PartReport(problem, save.on_shared.is_set()))
        result = MediumResult(entries=whole.files, num_bytes=whole.num_bytes, problem=_problems(reports))
        return result, reports[0].unneeded

    def _read_back(self, save: PendingSave) -> str:
        problem = ""
        if save.part is not None:
            try:
                problem = "; ".join(part_problems(save.part)[:3])
                if problem:
                    drop_staging(save.part.path)
            except (OSError, VerlSlurmError) as error:
                problem = f"{type(error).__name__}: {error}"
        return _problems(self._gather(_PartReport(problem)))

    def _tell(self, save: PendingSave, result: MediumResult, problem: str) -> None:
        if problem or save.on_kept is None or save.on_shared.is_set():
            return
        save.on_kept(
            save.saved(
                num_bytes=result.num_bytes,
                on_shared=False,
                problem=f"not on {Medium.SHARED}: it was still being written",
            )
        )

    def _gather(self, report: _PartReport) -> list[_PartReport]:
        return [
            msgspec.msgpack.decode(part, type=_PartReport)
            for part in self._ranks.gather(msgspec.msgpack.encode(report))
        ]


def _problems(reports: list[_PartReport]) -> str:
    return problems_of([report.problem for report in reports])
