"""Writes a save to one medium, on all ranks, and gathers the result.

A dual save does this twice at once, each with a thread and a process group of its own, so that neither medium waits
for the other: `save.ranks.saver` has shared storage, `save.ranks.second_copy` the nodes' own disks.
"""

from collections.abc import Callable
from concurrent.futures import wait

import msgspec

from verl_slurm.base.files import make_private
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.pending_save import Medium, MediumResult, PendingSave, problems_of
from verl_slurm.save.writer.writing import write_small


def write_to_medium(
    ranks: Collective, save: PendingSave, medium: Medium, *, first: Callable[[], None] = lambda: None
) -> MediumResult:
    """Makes every rank's files durable below its staging directory on `medium`, after `first`. Collective.

    Returns:
        Why not all ranks' files are durable there, on every rank; and on rank 0 the entries of all of them.

    Raises:
        RanksFailed: a rank failed with more than its storage.
    """

    def write() -> MediumResult:
        problem = ""
        answer = save.written[medium]
        try:
            # Before the first byte: who owns the run is asked here, where two media are written.
            first()
            small = save.small.result()
            # An error of the storage is a value and travels in the result; any other is an exception and stops all
            # ranks. So one medium may fail while the other goes on.
            try:
                directory = make_private(save.directories[medium])
                write_small(directory, {entry.path: data for entry, data in small})
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        finally:
            wait([answer])  # a directory must not be removed while the writer process still writes to it
        written = answer.result()
        # The first cause wins: where the small files could not be written, the tensors' error is the same one again.
        problem = problem or written.error or ""
        # Said before the gather, which waits for the slowest rank: at a deadline the daemon names the ranks that have
        # not said it.
        if save.on_part is not None and not problem:
            save.on_part()
        return MediumResult(entries=(*(entry for entry, _ in small), *written.files), problem=problem)

    # Three exchanges: `together` first, so that a rank that raises is known to all before any waits in the next one.
    mine = ranks.together("writing the checkpoint", write)
    problems = [part.decode(errors="replace") for part in ranks.gather(mine.problem.encode())]
    parts = ranks.gather_to_first(msgspec.msgpack.encode(mine.entries))
    return MediumResult(
        entries=tuple(
            entry for part in parts for entry in msgspec.msgpack.decode(part, type=tuple[FileEntry, ...])
        ),
        problem=problems_of(problems),
    )
