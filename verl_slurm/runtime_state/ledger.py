"""The rollout journal: a finished rollout is written before the next one begins, and durable before the next is
written.

After `append` returns, the kernel holds the record: no SIGKILL, crash or OOM of this process loses it. It is on the
disk (fdatasync) after the next `append`, `settle`, `compact` or `close` returns, which raises the error of a failed
sync. A power cut or the loss of a node therefore loses at most the newest record of a rank.

After SIGKILL the run loads its newest verified checkpoint and replays the journaled rollouts of the later steps. A
segment belongs to one rank of one attempt. Its owner alone writes it, under a lock that the kernel drops when the owner
dies.

Losing a record costs time and nothing else: sampling noise is counter-based, so a repeated rollout is the same rollout.
That is why a reader may choose to continue over damage (and must report it).
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Self, TypeVar

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.files import fsync_path, private_dir, write_file
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.runtime_state.format import MAX_RECORD_BYTES, Arrays
from verl_slurm.runtime_state.record import pack, unpack
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
from verl_slurm.runtime_state.segment_files import BackgroundSync, lock_segment, owner, segments, walk

_RENEW_EVERY_S = 60.0
"""A full disk stays full for a while, and each try reads all of the file."""

Key = tuple[int, int]
Fields = TypeVar("Fields")


class PackedRecord(NamedTuple):
    """What is appended: a packed record and its key."""

    step: int
    micro_batch: int
    record: bytes


def entry(step: int, micro_batch: int, arrays: Arrays, fields: object = None) -> PackedRecord:
    """Packs a record. `fields`: what its head says besides its arrays; None for a rollout.

    Raises:
        ValueError: an array the format does not know, or a record above MAX_RECORD_BYTES.
    """
    # The limit leaves room for the seal: whether a record fits must not depend on whether the run has a key.
    return PackedRecord(step, micro_batch, pack(fields, arrays, limit=MAX_RECORD_BYTES - OVERHEAD_BYTES))


class Ledger:
    """Writes one rank's segment of one attempt. One per rank.

    Opening an existing segment (a restart within the attempt) cuts its torn tail and appends after it.

    Raises:
        SegmentHeld: another process holds this segment and does not end.
        OSError: it cannot be opened.
    """

    def __init__(self, paths: RunPaths, attempt: int, rank: int, *, keys: Keyring | None = None) -> None:
        self.path = paths.ledger_segment(attempt, rank)
        self._attempt, self._rank, self._keys = attempt, rank, keys
        # Set when the file's end is not known to be a record's end. The file then takes nothing more, instead of
        # acknowledging records that no reader would find: the next record waits for a new file.
        self._broken, self._renew_at = False, 0.0
        # Training appends while the save path compacts in the background.
        self._writing = threading.Lock()
        self._sync = BackgroundSync()
        private_dir(self.path.parent, inside=paths.run)
        self._run = run_id(paths)
        self._fd = self._open()
        try:
            # Before the first append: a record written after half a record would read as damage in the middle, not as a
            # torn end.
            self._end = self._cut_torn_tail()
            # The segment's name: synced records in a file without one are lost with the node.
            fsync_path(self.path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, step: int, micro_batch: int, arrays: Arrays) -> int:
        """Writes one finished micro-batch after the previous one is durable, and begins to make it durable, too.

        Args:
            step: the step it belongs to (whole steps done before it).
            micro_batch: its global index in the step, over all ranks.
            arrays: the rollout batch. No array at all: the earlier record of this name is taken back.

        Returns:
            The bytes written.

        Raises:
            ValueError: an array the format does not know, or a record above MAX_RECORD_BYTES.
            OSError: the disk refused, and this record is not written. A failed write may be repeated. After a failed
                fsync of the previous record a new file is made first, which is tried once a minute.
        """
        return self.append_many([entry(step, micro_batch, arrays)])

    def append_many(self, entries: Sequence[PackedRecord]) -> int:
        """Writes several records as `append` one, with one write and one fdatasync; on OSError none of them."""
        with self._writing:
            return self._append(entries)

    def settle(self) -> None:
        """Waits until every record is durable. Raises OSError as `append`."""
        with self._writing:
            self._settle()

    def _settle(self) -> None:
        try:
            # The error of the sync that the record before began; it arrives here because nothing waited for it then.
            self._sync.wait()
        except OSError:
            self._broken = True
            raise

    def _append(self, entries: Sequence[PackedRecord]) -> int:
        if self._broken:
            # The kernel may have dropped the pages of a failed fsync: what can be read goes into a new file.
            self._renew()
        record = memoryview(b"".join(map(self._framed, entries)))
        self._settle()  # not earlier: the sync runs while all this is packed
        written = 0
        try:
            while written < len(record):
                # At a known offset, not O_APPEND: after a failed write `_end` still says where the last whole record
                # ends.
                written += os.pwrite(self._fd, record[written:], self._end + written)
        except OSError:
            # Otherwise the next record would follow half a record, and read as damage.
            self._broken = True
            # If this fails as well, `_broken` stays set.
            os.ftruncate(self._fd, self._end)
            self._broken = False
            raise
        self._end += len(record)
        # Not waited for: sampling the next micro-batch takes longer than the sync, which was most of the ledger's cost.
        self._sync.begin(self._fd)
        return len(record)

    def _framed(self, one: PackedRecord) -> bytes:
        payload = one.record
        if self._keys is not None:
            # Authenticated with the record: one that is moved to another place in the ledger does not open there.
            place = (self._run, self._attempt, self._rank, one.step, one.micro_batch)
            payload = seal_record(self._keys.current, place, payload)
        return frame(self._run, one.step, one.micro_batch, payload, sealed=self._keys is not None)

    def _renew(self) -> None:
        now = time.monotonic()
        if now < self._renew_at and self._fd >= 0:
            raise OSError(f"{self.path} takes no records: a former fsync or compaction failed")
        self._renew_at = now + _RENEW_EVERY_S
        self._compact(0)

    def compact(self, before_step: int) -> int:
        """Drops this segment's records of steps before `before_step`; returns the bytes freed."""
        with self._writing:
            return self._compact(before_step)

    def _compact(self, before_step: int) -> int:
        # Of the descriptor that is closed here; that of a broken file failed already.
        self._settle()
        keep = [head(self._attempt, self._rank)]
        keep.extend(
            os.pread(self._fd, item.end - item.offset, item.offset)
            for item in scan(self._fd, self._attempt, self._rank, self._run)
            # Damaged regions are dropped as well: no reader gets a record out of them.
            if isinstance(item, Frame) and item.step >= before_step
        )
        data = b"".join(keep)
        saved = self._end - len(data)
        if saved > 0 or self._broken:
            try:
                # The lock is on the old file. The new one is locked by `_open` before the old descriptor is closed.
                # By rename: a crash leaves the old segment or the new one.
                write_file(self.path, data)
                # If this fails after the rename, the old descriptor has no name any more; the comparison below finds
                # that out.
                old, self._fd = self._fd, self._open()
            except BaseException:
                # A record in a file without a name would never be read.
                self._broken |= not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
                raise
            os.close(old)
            self._end, self._broken = len(data), False
        return max(saved, 0)

    def close(self) -> None:
        """Closes the segment after making every record durable. Raises OSError if that failed, once closed."""
        if self._fd < 0:
            return
        try:
            # An error is raised, and the descriptor is closed all the same: the last record is then not promised.
            self.settle()
        finally:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        # Not O_TRUNC: a restart within the attempt continues the segment.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o600)
        try:
            # Before anything is read: a rank of the former start may still be ending, and append.
            lock_segment(fd, self.path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _cut_torn_tail(self) -> int:
        """Truncates after the last whole record; returns the offset of the next one."""
        size = os.fstat(self._fd).st_size
        items = list(scan(self._fd, self._attempt, self._rank, self._run))
        end = size
        # A damage in the middle stays for readers to report; what was never whole is cut.
        if items and isinstance(items[-1], Gap) and items[-1].torn:
            end = items[-1].offset
        # A start that was killed in the first write of this file: nothing in it was ever acknowledged.
        if end < HEAD_BYTES:
            os.ftruncate(self._fd, 0)
            start = head(self._attempt, self._rank)
            os.pwrite(self._fd, start, 0)
            end = len(start)
        elif end < size:
            os.ftruncate(self._fd, end)
        # The head and the cut are durable before the first record: later syncs are fdatasync, of the records.
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
    """Loads the journaled rollouts of the steps from `from_step` on, over every attempt and rank. Runs on every rank.

    Args:
        from_step: whole steps done in the state that is resumed.
        wanted: called with step and global micro-batch of a record. A refused record is not decoded.
        taken_back: called in the same way for each record that was taken back, whether or not it was recorded anew.
        report: called with one line for each damaged region; loading then continues without its content. None: damage
            raises.
        keys: if given, records must be sealed with one of them; any other counts as damage.

    Returns:
        (step, global micro-batch) → arrays. If several attempts hold one, the newest attempt's.

    Raises:
        CheckpointCorrupt: a region in the middle of a segment is damaged, and there is no `report`.
        KeyRefused: a record is sealed, and there is no key or another one; with a `report`, too.
    """
    rollouts: dict[Key, Arrays] = {}
    # A rank holds its own rollouts in memory, not those of all ranks.
    found = records(paths, type(None), from_step=from_step, wanted=wanted, report=report, keys=keys)
    for key, _, arrays in found:
        # In the order of `records`: the newest attempt comes last and wins. A record without arrays takes back what
        # older ones said.
        if arrays:
            rollouts[key] = arrays
        else:
            rollouts.pop(key, None)
            # Told even if a later record brings it back: a checkpoint may hold the refused rollout, and must not be
            # used either.
            taken_back(*key)
    return rollouts


def records(
    paths: RunPaths,
    fields: type[Fields],
    *,
    from_step: int,
    wanted: Callable[[int, int], bool] = lambda step, micro_batch: True,
    report: Callable[[str], None] | None = None,
    keys: Keyring | None = None,
) -> Iterator[tuple[Key, Fields, Arrays]]:
    """Yields every whole record of the steps from `from_step` on, the newest attempt's last: its key, what its head
    says, and its arrays. A head that is not of type `fields` counts as damage. Arguments and errors as `load`.
    """
    for path, fd, item in walk(paths, check_from_step=from_step):
        if isinstance(item, Gap):
            _complain(paths, path, item, report)
        # Judged by the frame, before anything is decompressed.
        elif item.step >= from_step and wanted(item.step, item.micro_batch):
            found = _record(path, item, item.payload(fd), fields, report, keys)
            if found is not None:
                yield (item.step, item.micro_batch), *found


class Index(Generic[Fields]):
    """Finds single records without loading the others: where the newest record of each key lies. Reads the segments
    when it is made, and one again that was compacted since; later records are not in it.

    Arguments as for `records`; `report` is told of a record that cannot be read later, too.
    """

    def __init__(
        self,
        paths: RunPaths,
        fields: type[Fields],
        *,
        report: Callable[[str], None] | None = None,
        keys: Keyring | None = None,
    ) -> None:
        self._paths, self._fields, self._report, self._keys = paths, fields, report, keys
        self._places: dict[Key, tuple[Path, Frame]] = {}
        for path, _, item in walk(paths):
            if isinstance(item, Gap):
                _complain(paths, path, item, report)
            else:
                # In the order of `walk`: the newest attempt comes last and wins.
                self._places[item.step, item.micro_batch] = path, item

    def __len__(self) -> int:
        return len(self._places)

    def read(self, step: int, micro_batch: int) -> tuple[Fields, Arrays] | None:
        """Returns what a record's head says, and its arrays; None: there is none, or it cannot be read any more. Raises
        CheckpointCorrupt and KeyRefused as `load`.
        """
        place = self._places.get((step, micro_batch))
        if place is None:
            return None
        path, item = place
        try:
            fd = open_segment(path)
        except FileNotFoundError:  # pruned: its steps are in every checkpoint
            return None
        try:
            payload = item.payload(fd)
            if payload is None:
                # Its owner, which may be this process, has dropped older records since, and so moved the others.
                self._look_again(path, fd)
                if (place := self._places.get((step, micro_batch))) is None:
                    return None
                _, item = place
                payload = item.payload(fd)
            return _record(path, item, payload, self._fields, self._report, self._keys)
        finally:
            os.close(fd)

    def _look_again(self, path: Path, fd: int) -> None:
        mine = {key for key, (where, _) in self._places.items() if where == path}
        for key in mine:
            del self._places[key]
        for item in scan(fd, *owner(path), run_id(self._paths)):
            if isinstance(item, Gap):
                _complain(self._paths, path, item, self._report)
            elif (key := (item.step, item.micro_batch)) in mine:
                self._places[key] = path, item


def prune(paths: RunPaths, before_step: int, *, current_attempt: int | None = None) -> list[Path]:
    """Removes segments that hold nothing from `before_step` on, that of the oldest checkpoint that is kept. Returns
    what was removed. Runs on rank 0.

    A segment of `current_attempt` or later stays. So does one with damage or under a live writer's lock.
    """
    removed = []
    for attempt, rank, path in segments(paths):
        # The owner compacts its own.
        # Later ones, too: this rank may be fenced off and not know it yet.
        if current_attempt is not None and attempt >= current_attempt:
            continue
        fd = open_segment(path)
        try:
            items = scan(fd, attempt, rank, run_id(paths), check_from_step=before_step)
            needed = any(
                (isinstance(item, Gap) and not item.torn)
                or (isinstance(item, Frame) and item.step >= before_step)
                for item in items
            )
            # The content of damage is not known.
            # A former attempt's rank can still be alive on a node that lost its controller, and write.
            if needed or is_locked(fd):
                continue
            path.unlink()
            removed.append(path)
        finally:
            os.close(fd)
    if removed:
        # Once for all: a name that a power cut brings back is removed by the next prune.
        fsync_path(paths.ledger)
    return removed


def _complain(paths: RunPaths, path: Path, gap: Gap, report: Callable[[str], None] | None) -> None:
    # The end of a killed process's file, as expected: at most the record that was being written.
    if gap.torn:
        return
    if gap.run:
        error = CheckpointCorrupt(
            "records of another run are in the ledger, and are not used",
            where=path,
            found=f"run id {gap.run} in bytes {gap.offset} to {gap.end}",
            expected=f"run id {run_id(paths)}, as {paths.run_id} says",
            remedy="this run's own rollouts are sampled again; move the file out of the run. If it is this run's, and "
            f"run_id was lost: echo {gap.run} > {paths.run_id}",
        )
    else:
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


def _record(
    path: Path,
    item: Frame,
    payload: bytes | None,
    fields: type[Fields],
    report: Callable[[str], None] | None,
    keys: Keyring | None,
) -> tuple[Fields, Arrays] | None:
    """Returns head and arrays of a record that the scan found whole; None: they cannot be read, and `report` was
    told."""
    try:
        # Its checksum was right when it was scanned: the storage gives different bytes now.
        if payload is None:
            raise CheckpointCorrupt("a ledger record changed while it was read", where=path)
        place = (item.run, *owner(path), item.step, item.micro_batch)
        # `KeyRefused` passes through: with the wrong key every record would count as damaged, and all rollouts be
        # sampled again.
        payload = open_record(keys, place, payload, sealed=item.sealed, where=f"{path}@{item.offset}")
        return unpack(payload, fields, where=f"{path}@{item.offset}", limit=MAX_RECORD_BYTES)
    except CheckpointCorrupt as error:
        if report is None:
            raise
        report(error.one_line())
        return None
