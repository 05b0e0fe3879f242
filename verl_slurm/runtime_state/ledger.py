"""The rollout journal: a finished rollout is written before the next one begins, and durable before the next is
written.

After `append` returns, the kernel holds the record: no SIGKILL, crash or OOM of this process loses it. It is on the
disk (fdatasync) after the next `append`, `settle`, `compact` or `close` returns: the sync of a record runs while the
next micro-batch is sampled. A power cut or the loss of a node therefore loses at most the newest record of a rank, the
one whose sync is under way. The next of these calls raises the error of a failed sync.

After SIGKILL the run loads its newest verified checkpoint and replays the journaled rollouts of the later steps, so no
rollout is generated twice. After the loss of a node, at most one micro-batch of each rank is. A segment belongs to one
rank of one epoch. Its owner alone writes it, under a lock that the kernel drops when the owner dies.

Losing a record costs time and nothing else: sampling noise is counter-based, so a repeated rollout is the same rollout.
That is why a reader may choose to continue over damage (and must report it).
"""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.files import fsync_path, private_dir, write_file
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.container import pack, specify, unpack
from verl_slurm.runtime_state.format import MAX_RECORD_BYTES, Arrays, RecordHeader
from verl_slurm.runtime_state.sealing import OVERHEAD_BYTES, open_record, seal_record
from verl_slurm.runtime_state.segment import (
    HEAD_BYTES,
    Frame,
    Gap,
    frame,
    head,
    is_locked,
    open_segment,
    scan,
)
from verl_slurm.runtime_state.segment_files import BackgroundSync, lock_segment, owner, segments

__all__ = ["Key", "Ledger", "load", "prune", "records"]

_GROUP = "rollouts"

Key = tuple[int, int]


class Ledger:
    """Writes one rank's segment of one epoch. One per rank.

    Opening an existing segment (a restart within the epoch) cuts its torn tail and appends after it.

    Raises:
        SegmentHeld: another process holds this segment and does not end.
        OSError: it cannot be opened.
    """

    def __init__(self, paths: RunPaths, epoch: int, rank: int, *, keys: Keyring | None = None) -> None:
        self.path = paths.ledger_segment(epoch, rank)
        self._epoch, self._rank, self._keys = epoch, rank, keys
        self._broken = False
        # Training appends while the save path compacts in the background.
        self._writing = threading.Lock()
        self._sync = BackgroundSync()
        private_dir(self.path.parent)
        self._fd = self._open()
        try:
            self._end = self._cut_torn_tail()
            fsync_path(self.path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, step: int, micro_batch: int, arrays: Arrays) -> int:
        """Writes one finished micro-batch after the previous one is durable, and begins to make it durable, too.

        Returns:
            The bytes written.

        Args:
            step: the step it belongs to (whole steps done before it).
            micro_batch: its global index in the step, over all ranks.
            arrays: the rollout batch. No array at all: the earlier record of this name is taken back.

        Raises:
            ValueError: an array the format does not know, or a record above MAX_RECORD_BYTES.
            OSError: the disk refused, and this record is not written. A failed write may be repeated. After a failed
                fsync of the previous record the segment stays closed, since the kernel may have dropped the pages.
        """
        with self._writing:
            return self._append(step, micro_batch, arrays)

    def settle(self) -> None:
        """Waits until every record is durable.

        Raises:
            OSError: the fsync failed; as for `append`.
        """
        with self._writing:
            self._settle()

    def _settle(self) -> None:
        try:
            self._sync.wait()
        except OSError:
            self._broken = True
            raise

    def _append(self, step: int, micro_batch: int, arrays: Arrays) -> int:
        if self._broken:
            raise OSError(f"{self.path} takes no more records: a former fsync or compaction failed")
        header = RecordHeader(step=step, micro_batch=micro_batch, arrays=specify(_GROUP, arrays), frames=[])
        payload = pack(header, arrays.values(), limit=MAX_RECORD_BYTES - OVERHEAD_BYTES)
        if self._keys is not None:
            place = (self._epoch, self._rank, step, micro_batch)
            payload = seal_record(self._keys.current, place, payload)
        record = memoryview(frame(step, micro_batch, payload, sealed=self._keys is not None))
        self._settle()  # not earlier: the sync runs while all this is packed
        written = 0
        try:
            while written < len(record):
                written += os.pwrite(self._fd, record[written:], self._end + written)
        except OSError:
            # Otherwise the next record would follow half a record, and read as damage.
            self._broken = True
            os.ftruncate(self._fd, self._end)
            self._broken = False
            raise
        self._end += len(record)
        self._sync.begin(self._fd)
        return len(record)

    def compact(self, before_step: int) -> int:
        """Drops this segment's records of steps before `before_step`; returns the bytes freed. The file is replaced by
        rename, so a crash leaves the old segment or the new one."""
        with self._writing:
            return self._compact(before_step)

    def _compact(self, before_step: int) -> int:
        self._settle()  # of the descriptor that is closed here
        keep = [head(self._epoch, self._rank)]
        keep.extend(
            os.pread(self._fd, item.end - item.offset, item.offset)
            for item in scan(self._fd, self._epoch, self._rank)
            if isinstance(item, Frame) and item.step >= before_step
        )
        data = b"".join(keep)
        saved = self._end - len(data)
        if saved > 0:
            try:
                write_file(self.path, data)
                old, self._fd = self._fd, self._open()
            except BaseException:
                # A record in a file without a name would never be read.
                self._broken |= not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
                raise
            os.close(old)
            self._end = len(data)
        return max(saved, 0)

    def close(self) -> None:
        """Closes the segment after making every record durable.

        Raises:
            OSError: the fsync of the last record failed; the segment is closed anyway.
        """
        if self._fd < 0:
            return
        try:
            self.settle()
        finally:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o600)
        try:
            lock_segment(fd, self.path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _cut_torn_tail(self) -> int:
        """Truncates after the last whole record; returns the offset of the next one."""
        size = os.fstat(self._fd).st_size
        items = list(scan(self._fd, self._epoch, self._rank))
        end = size
        if items and isinstance(items[-1], Gap) and items[-1].torn:
            end = items[-1].offset
        if end < HEAD_BYTES:
            os.ftruncate(self._fd, 0)
            start = head(self._epoch, self._rank)
            os.pwrite(self._fd, start, 0)
            end = len(start)
        elif end < size:
            os.ftruncate(self._fd, end)
        os.fsync(self._fd)  # noqa: TID251 - of the descriptor that it appends to
        return end


def load(
    paths: RunPaths,
    *,
    from_step: int,
    wanted: Callable[[int, int], bool] = lambda step, micro_batch: True,
    taken_back: Callable[[int, int], None] = lambda step, micro_batch: None,
    report: Callable[[str], None] | None = None,
    keys: Keyring | None = None,
) -> dict[Key, Arrays]:
    """Loads the journaled rollouts of the steps from `from_step` on, over every epoch and rank. Runs on every rank.

    Args:
        from_step: whole steps done in the state that is resumed.
        wanted: called with step and global micro-batch of a record. A refused record is not decoded: a rank holds its
            own rollouts in memory, not those of all ranks.
        taken_back: called in the same way for each record that was taken back, whether or not it was recorded anew.
        report: called with one line for each damaged region; loading then continues without its content. None: damage
            raises.
        keys: if given, records must be sealed with one of them; any other counts as damage.

    Returns:
        (step, global micro-batch) → arrays. If several epochs hold one, the newest epoch's.

    Raises:
        CheckpointCorrupt: a region in the middle of a segment is damaged, and there is no `report`.
        KeyRefused: a record is sealed, and there is no key or another one; with a `report`, too.
    """
    rollouts: dict[Key, Arrays] = {}
    for key, arrays in records(paths, from_step=from_step, wanted=wanted, report=report, keys=keys):
        if arrays:
            rollouts[key] = arrays
        else:
            rollouts.pop(key, None)
            taken_back(*key)
    return rollouts


def records(
    paths: RunPaths,
    *,
    from_step: int,
    wanted: Callable[[int, int], bool] = lambda step, micro_batch: True,
    report: Callable[[str], None] | None = None,
    keys: Keyring | None = None,
) -> Iterator[tuple[Key, Arrays]]:
    """Yields every whole record of the steps from `from_step` on, the newest epoch's last; arguments and errors as
    `load`.

    Returns:
        (step, global micro-batch) and arrays. Without arrays the record takes back those before it.
    """
    for path, fd, item in _walk(paths, from_step):
        if isinstance(item, Gap):
            _complain(path, item, report)
        elif item.step >= from_step and wanted(item.step, item.micro_batch):
            arrays = _arrays(path, fd, item, report, keys)
            if arrays is not None:
                yield (item.step, item.micro_batch), arrays


def prune(paths: RunPaths, before_step: int, *, current_epoch: int | None = None) -> list[Path]:
    """Removes segments that hold nothing from `before_step` on; returns what was removed. Runs on rank 0.

    A segment of `current_epoch` or later stays (its owner compacts it). So does one with damage or under a live
    writer's lock: its content is unknown, or about to change.

    Args:
        before_step: `step` of the oldest checkpoint that is kept.
    """
    removed = []
    for epoch, rank, path in segments(paths):
        if current_epoch is not None and epoch >= current_epoch:
            continue
        fd = open_segment(path)
        try:
            items = scan(fd, epoch, rank, check_from_step=before_step)
            needed = any(
                (isinstance(item, Gap) and not item.torn)
                or (isinstance(item, Frame) and item.step >= before_step)
                for item in items
            )
            if needed or is_locked(fd):
                continue
            path.unlink()
            removed.append(path)
        finally:
            os.close(fd)
    if removed:
        fsync_path(paths.ledger)
    return removed


def _walk(paths: RunPaths, from_step: int) -> Iterator[tuple[Path, int, Frame | Gap]]:
    for epoch, rank, path in segments(paths):
        fd = open_segment(path)
        try:
            for item in scan(fd, epoch, rank, check_from_step=from_step):
                yield path, fd, item
        finally:
            os.close(fd)


def _complain(path: Path, gap: Gap, report: Callable[[str], None] | None) -> None:
    if gap.torn:
        return
    error = CheckpointCorrupt(
        "the ledger is damaged in its middle",
        where=path,
        found=f"bytes {gap.offset} to {gap.end} are no record",
        expected="whole records up to the end",
        remedy="its rollouts will be generated again; check the storage",
    )
    if report is None:
        raise error
    report(error.one_line())


def _arrays(
    path: Path, fd: int, item: Frame, report: Callable[[str], None] | None, keys: Keyring | None
) -> Arrays | None:
    """Returns the arrays of a record that the scan found whole; None: they cannot be read, and `report` was told."""
    payload = item.payload(fd)
    try:
        if payload is None:
            raise CheckpointCorrupt("a ledger record changed while it was read", where=path)
        place = (*owner(path), item.step, item.micro_batch)
        payload = open_record(keys, place, payload, sealed=item.sealed, where=f"{path}@{item.offset}")
        header, groups = unpack(payload, RecordHeader, where=f"{path}@{item.offset}", limit=MAX_RECORD_BYTES)
        if (header.step, header.micro_batch) != (item.step, item.micro_batch) or set(groups) - {_GROUP}:
            raise CheckpointCorrupt("a ledger record and its frame disagree", where=f"{path}@{item.offset}")
        arrays = {k: v for k, v in groups.get(_GROUP, {}).items() if isinstance(v, np.ndarray)}
        if len(arrays) != len(header.arrays):
            raise CheckpointCorrupt("a ledger record holds bytes for arrays", where=f"{path}@{item.offset}")
    except CheckpointCorrupt as error:
        if report is None:
            raise
        report(error.one_line())
        return None
    return arrays
