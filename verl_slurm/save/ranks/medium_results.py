"""One medium of a save, as all ranks see it: their files made durable there, and what these are.

A dual save has two such sides at once, each with a thread and a conversation of its own, so that neither waits for
the other: `save.ranks.saver` has shared storage, `save.ranks.second_copy` the nodes' own disks.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_slurm.base.files import make_private
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.writer.media import Share, failures
from verl_slurm.save.writer.metadata_files import write_small
from verl_slurm.save.writer.protocol import Written

__all__ = ["Side", "Small", "write_side"]


@dataclass(frozen=True)
class Small:
    """This rank's files that are not tensors, encrypted where a key is configured: the same bytes on every medium."""

    files: dict[str, bytes]
    entries: list[FileEntry]


@dataclass(frozen=True)
class Side:
    """What a medium has of a save; the same on every rank.

    Attributes:
        entries: of all ranks' files.
        problem: why not all of them are durable there; empty: they are.
    """

    entries: list[FileEntry]
    problem: str


def write_side(
    ranks: Collective,
    directory: Path,
    small: "Future[Small]",
    answer: "Future[Written]",
    *,
    first: Callable[[], None] = lambda: None,
    on_part: Callable[[], None] | None = None,
) -> Side:
    """Have every rank's files below `directory`, durably. Collective.

    Args:
        directory: this rank's staging directory on the medium.
        answer: the saver's word on the tensors.
        first: done before anything else; what it raises fails the save.
        on_part: told when this rank's own files are durable, before the others' are waited for.

    Raises:
        RanksFailed: a rank failed with more than its storage.
    """

    def write() -> Share:
        failed = ""
        try:
            first()
            mine = small.result()
            try:
                write_small(make_private(directory), mine.files)
            except OSError as error:
                failed = f"{type(error).__name__}: {error}"
        finally:
            wait([answer])  # whoever cleans up must not do so under a saver that writes
        written = answer.result()
        failed = failed or written.outcome.error or ""
        if on_part is not None and not failed:
            on_part()
        return Share((*mine.entries, *written.files), failed)

    share = ranks.together("writing the checkpoint", write)
    shares = [
        msgspec.msgpack.decode(part, type=Share) for part in ranks.gather(msgspec.msgpack.encode(share))
    ]
    return Side([entry for share in shares for entry in share.entries], failures(shares))
