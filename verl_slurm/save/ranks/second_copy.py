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
from verl_slurm.checkpoint.store import local_copy
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.medium_results import write_to_medium
from verl_slurm.save.ranks.pending_save import LocalPlace, Medium, MediumResult, PendingSave, problems_of


class _PartReport(msgspec.Struct, frozen=True):
    """Each rank's report about its node's part; the ranks gather it."""

    problem: str = ""
    unneeded: bool = False
    """Shared storage has the checkpoint: the part need not be read back. Rank 0's counts."""


class _Whole(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0 broadcasts it: the manifest of the whole checkpoint, and the bytes of all files in it."""

    num_bytes: int
    manifest: bytes


class NodeCopies:
    """Saves to the nodes' disks. Collective; made on the main thread of every rank."""

    def __init__(self, ranks: Collective, place: LocalPlace) -> None:
        # A process group of its own: this thread and "checkpoint" talk at the same time, and collectives of two
        # conversations on one group would pair up wrongly.
        self._ranks, self._place = ranks.another(), place
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="second-copy")

    def begin(
        self, save: PendingSave, manifest: Callable[[tuple[FileEntry, ...]], Manifest]
    ) -> "Future[MediumResult]":
        """Writes the save, and commits it when every rank's part is durable; returns at once.

        `manifest`, rank 0's, is called from the thread "second-copy". The future is done once the save is
        committed or has failed; it raises `RanksFailed`.
        """
        done: Future[MediumResult] = Future()

        def work() -> None:
            try:
                # `read_back` is set before `done`: the thread "checkpoint" looks at it as soon as `done` is there, and
                # would otherwise start a second reading.
                result, unneeded = self._commit(save, manifest)
                if save.on_kept is not None and not result.problem and not unneeded:
                    save.read_back = Future()
            except BaseException as error:  # noqa: BLE001 - raised where `done` is read
                done.set_exception(error)
                return
            # Now, and not after the reading back: the save as a whole does not wait for it if shared storage succeeds.
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
        """Reads all nodes' parts, once `begin` is done; returns faults, and removes bad parts. Collective."""
        # On the thread "second-copy" in both cases: the parts' collectives belong to its group.
        found = save.read_back or self._thread.submit(self._read_back, save)
        return found.result()

    def prune(self) -> None:
        """Remove older parts, once the newest is known to be good or not to be needed."""
        if self._place.is_first:
            with suppress(OSError):
                # One rank of a node does it, and an error is dropped: older parts cost room, and the next save tries
                # again.
                local_copy.prune_parts(self._place.directory, self._place.keep)

    def drop(self, staging: Path) -> None:
        """Remove the remains of a failed save. A committed part stays: it is whole, and may be the last copy."""
        if self._place.is_first:
            local_copy.drop_staging(staging)

    def close(self) -> None:
        """Wait for saves under way."""
        self._thread.shutdown()

    def _commit(
        self, save: PendingSave, manifest: Callable[[tuple[FileEntry, ...]], Manifest]
    ) -> tuple[MediumResult, bool]:
        """The result, and whether reading the parts back is not needed."""
        directory = save.directories[Medium.LOCAL]
        # Every rank of every node is durable before any part is committed: a checkpoint comes home from all its nodes
        # or not at all.
        result = write_to_medium(self._ranks, save, Medium.LOCAL)
        # The result is the same on every rank, so all leave here together and none waits in the next collective.
        if result.problem:
            return result, True

        def made() -> _Whole:
            whole = manifest(result.entries)
            return _Whole(whole.num_bytes, render(whole))

        told = self._ranks.on_first("committing the second copy", made, _Whole)
        problem = ""
        if self._place.is_first:
            try:
                # Storage errors are a value here: one node's disk must not stop ranks whose shared storage is fine.
                # Parsed on each node: every part then holds the same signed bytes.
                save.part = local_copy.commit_part(directory, parse(told.manifest, where=directory))
            except (OSError, VerlSlurmError) as error:
                problem = f"{type(error).__name__}: {error}"
        # Whether to read back must be decided alike on every rank, because reading back is collective. So rank 0's view
        # counts, though another rank may see `on_shared` a moment later.
        reports = self._ranks.values(_PartReport(problem, save.on_shared.is_set()), _PartReport)
        result = MediumResult(num_bytes=told.num_bytes, problem=_problems(reports))
        return result, reports[0].unneeded

    def _read_back(self, save: PendingSave) -> str:
        problem = ""
        if save.part is not None:
            try:
                # Bytes that were just written are in the page cache, so the parts are read around it, from the disk.
                problem = "; ".join(local_copy.part_problems(save.part)[:3])
                if problem:
                    # A damaged part is removed: its node would otherwise report it at the next start, and bringing it
                    # home would fail.
                    local_copy.drop_staging(save.part.path)
            except (OSError, VerlSlurmError) as error:
                problem = f"{type(error).__name__}: {error}"
        return _problems(self._ranks.values(_PartReport(problem), _PartReport))

    def _tell(self, save: PendingSave, result: MediumResult, problem: str) -> None:
        # Shared storage may have finished during the reading back; then the plain answer is on its way.
        if problem or save.on_kept is None or save.on_shared.is_set():
            return
        save.on_kept(
            save.saved(
                num_bytes=result.num_bytes,
                on_shared=False,
                problem=f"not on {Medium.SHARED}: it was still being written",
            )
        )


def _problems(reports: list[_PartReport]) -> str:
    return problems_of([report.problem for report in reports])
