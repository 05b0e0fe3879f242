import errno
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ledger_stats import ledger_stats
from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import Keyring, MasterKey
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.runtime_state import ledger as module, segment_files
from verl_slurm.runtime_state.format import Arrays
from verl_slurm.runtime_state.ledger import Index, Ledger, load, prune
from verl_slurm.runtime_state.segment import FRAME_BYTES, HEAD_BYTES, frame, head
from verl_slurm.runtime_state.segment_files import BackgroundSync, SegmentHeld

Batch = Callable[..., Arrays]


def equal(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes() for k in a
    )


def fill(paths: RunPaths, batch: Batch, attempt: int, rank: int, *keys: tuple[int, int]) -> list[int]:
    """Append one record a key; returns their sizes in bytes."""
    with Ledger(paths, attempt, rank) as ledger:
        return [ledger.append(step, j, batch(step * 10 + j)) for step, j in keys]


def test_what_was_appended_is_loaded_bit_for_bit_over_epochs_and_ranks(paths: RunPaths, batch: Batch) -> None:
    assert load(paths, from_step=0) == {}
    fill(paths, batch, 1, 0, (0, 0), (1, 0), (1, 2))
    fill(paths, batch, 1, 1, (0, 1), (1, 1))
    fill(paths, batch, 2, 0, (2, 0))
    found = load(paths, from_step=1)
    assert found.keys() == {(1, 0), (1, 1), (1, 2), (2, 0)}
    assert all(equal(arrays, batch(step * 10 + j)) for (step, j), arrays in found.items())
    counted = ledger_stats(paths)
    assert (counted.records, counted.rollouts, counted.tokens) == (6, 24, 48)
    assert counted.duplicates == counted.problems == ()


def test_segments_are_private(paths: RunPaths, batch: Batch) -> None:
    fill(paths, batch, 1, 0, (0, 0))
    assert paths.ledger.stat().st_mode & 0o777 == 0o700
    assert paths.ledger_segment(1, 0).stat().st_mode & 0o777 == 0o600


def test_every_cut_of_the_tail_loses_only_the_record_that_was_cut(paths: RunPaths, batch: Batch) -> None:
    fill(paths, batch, 1, 0, (0, 0), (0, 1))
    segment = paths.ledger_segment(1, 0)
    data = segment.read_bytes()
    first = HEAD_BYTES + (len(data) - HEAD_BYTES) // 2
    ends = []
    for size in range(len(data)):
        segment.write_bytes(data[:size])
        found = load(paths, from_step=0)  # a torn tail is no error
        ends.append(len(found))
        assert all(equal(arrays, batch(j)) for (_, j), arrays in found.items())
    assert ends == sorted(ends)
    assert ends[-1] == 1
    assert abs(ends.index(1) - first) < 20
    assert ledger_stats(paths).problems == ()


def test_a_tail_of_zeros_or_garbage_is_cut_too(paths: RunPaths, batch: Batch) -> None:
    sizes = fill(paths, batch, 1, 0, (0, 0), (0, 1))
    segment = paths.ledger_segment(1, 0)
    data = segment.read_bytes()
    keep = HEAD_BYTES + sizes[0]
    for tail in (bytes(len(data) - keep), bytes(4000), os.urandom(5000), b"VSLR" * 700):
        segment.write_bytes(data[:keep] + tail)
        assert load(paths, from_step=0).keys() == {(0, 0)}


def test_a_hole_of_any_size_is_passed_over_at_once(paths: RunPaths, batch: Batch) -> None:
    fill(paths, batch, 1, 0, (0, 0))
    segment = paths.ledger_segment(1, 0)
    record, size = segment.read_bytes()[HEAD_BYTES:], 1 << 40
    os.truncate(segment, size)
    assert load(paths, from_step=0).keys() == {(0, 0)}
    with segment.open("r+b") as file:
        file.seek(size)
        file.write(record)
    with pytest.raises(CheckpointCorrupt, match=f"to {size}"):
        load(paths, from_step=0)


def test_a_restart_within_the_attempt_cuts_the_torn_tail_and_goes_on(paths: RunPaths, batch: Batch) -> None:
    fill(paths, batch, 1, 0, (0, 0), (0, 1))
    segment = paths.ledger_segment(1, 0)
    segment.write_bytes(segment.read_bytes()[:-5])
    fill(paths, batch, 1, 0, (0, 1), (0, 2))
    assert load(paths, from_step=0).keys() == {(0, 0), (0, 1), (0, 2)}
    assert ledger_stats(paths).problems == ()
    for torn_head in (b"", b"VSLE"):
        segment.write_bytes(torn_head)
        fill(paths, batch, 1, 0, (3, 0))
        assert load(paths, from_step=0).keys() == {(3, 0)}


def test_a_damaged_middle_is_reported_with_its_place_and_the_rest_is_kept(
    paths: RunPaths, batch: Batch
) -> None:
    sizes = fill(paths, batch, 1, 0, (0, 0), (0, 1), (0, 2))
    segment = paths.ledger_segment(1, 0)
    good = segment.read_bytes()
    start = HEAD_BYTES + sizes[0]
    for at in (*range(start, start + 30), start + sizes[1] - 1):
        data = bytearray(good)
        data[at] ^= 0x10
        segment.write_bytes(data)
        with pytest.raises(CheckpointCorrupt, match=f"bytes {start} to {start + sizes[1]}"):
            load(paths, from_step=0)
        lines: list[str] = []
        assert load(paths, from_step=0, report=lines.append).keys() == {(0, 0), (0, 2)}
        assert len(lines) == 1
        assert segment.name in lines[0]
        assert len(ledger_stats(paths).problems) == 1


def test_a_damaged_head_is_reported_and_its_records_are_kept(paths: RunPaths, batch: Batch) -> None:
    fill(paths, batch, 1, 0, (0, 0))
    fill(paths, batch, 7, 0, (0, 1))
    paths.ledger_segment(7, 0).rename(paths.ledger_segment(2, 0))  # its head says attempt 7
    lines: list[str] = []
    assert load(paths, from_step=0, report=lines.append).keys() == {(0, 0), (0, 1)}
    assert len(lines) == 1


def test_a_magic_across_a_block_border_is_found(
    paths: RunPaths, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_slurm.runtime_state import segment as module

    sizes = fill(paths, batch, 1, 0, (0, 0), (0, 1))
    segment = paths.ledger_segment(1, 0)
    data = bytearray(segment.read_bytes())
    data[HEAD_BYTES] ^= 1
    segment.write_bytes(data)
    for block in range(sizes[0] - 6, sizes[0] + 6):
        monkeypatch.setattr(module, "_BLOCK", block)
        assert load(paths, from_step=0, report=lambda line: None).keys() == {(0, 1)}


def test_of_two_attempts_with_the_same_micro_batch_the_newest_counts_and_it_is_counted(
    paths: RunPaths, batch: Batch
) -> None:
    with Ledger(paths, 2, 0) as ledger:
        ledger.append(3, 1, batch(2))
    with Ledger(paths, 1, 1) as ledger:
        ledger.append(3, 1, batch(1))
    assert equal(load(paths, from_step=0)[3, 1], batch(2))
    assert ledger_stats(paths).duplicates == ((3, 1),)


def test_two_living_writers_of_one_segment_are_not_allowed(
    paths: RunPaths, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "_PATIENCE_S", 0.0)
    with Ledger(paths, 1, 0), pytest.raises(SegmentHeld) as caught:
        Ledger(paths, 1, 0)
    assert caught.value.exit_code is ExitCode.INTERNAL  # a crash, to be tried again: nobody fenced us off
    Ledger(paths, 1, 0).close()


def test_a_segment_whose_owner_is_slow_to_die_is_waited_for(
    paths: RunPaths, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = Ledger(paths, 1, 0)
    dying.append(0, 0, batch(0))
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            dying.close()

    monkeypatch.setattr(segment_files.time, "sleep", wait)
    with Ledger(paths, 1, 0) as ledger:
        ledger.append(0, 1, batch(1))
    assert len(waits) == 3
    assert load(paths, from_step=0).keys() == {(0, 0), (0, 1)}


def test_the_wait_for_a_segment_ends(paths: RunPaths, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(segment_files.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(segment_files.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    with Ledger(paths, 1, 0), pytest.raises(SegmentHeld, match="waited 10 s"):
        Ledger(paths, 1, 0)
    assert 10 <= clock[0] < 11


def test_a_segment_that_cannot_be_opened_says_nothing_but_what_the_system_said(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object, **__: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    Ledger(paths, 1, 0).close()
    with monkeypatch.context() as patch:
        patch.setattr(segment_files, "open_segment", stale)
        with pytest.raises(OSError, match="Stale"):
            load(paths, from_step=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", stale)
        with pytest.raises(OSError, match="Stale"):
            Ledger(paths, 1, 0)


def test_what_a_reader_does_not_want_is_not_decoded(
    paths: RunPaths, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(paths, batch, 1, 0, (0, 0), (1, 0), (1, 2))
    fill(paths, batch, 1, 1, (0, 1), (1, 1), (1, 3))
    decoded: list[str] = []
    unpack = module.unpack

    def count(*args: Any, **kwargs: Any) -> Any:
        decoded.append(str(kwargs["where"]))
        return unpack(*args, **kwargs)

    monkeypatch.setattr(module, "unpack", count)
    found = load(paths, from_step=1, wanted=lambda step, micro_batch: micro_batch % 2 == 1)
    assert found.keys() == {(1, 1), (1, 3)}
    assert len(decoded) == 2


def test_links_and_foreign_names_are_no_segments(paths: RunPaths, batch: Batch) -> None:
    fill(paths, batch, 1, 0, (0, 0))
    paths.ledger_segment(2, 0).symlink_to(paths.ledger_segment(1, 0))
    (paths.ledger / "attempt_000003.rank_0000.ledger.tmp").write_bytes(b"x")
    (paths.ledger / "attempt_4294967296.rank_0000.ledger").write_bytes(b"x")
    assert ledger_stats(paths).records == 1
    with pytest.raises(OSError, match="symbolic"):
        Ledger(paths, 2, 0)


def test_a_write_that_fails_is_taken_back_and_the_next_append_works(
    paths: RunPaths, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    with Ledger(paths, 1, 0) as ledger:
        ledger.append(0, 0, batch(0))

        def full(fd: int, data: memoryview, offset: int) -> int:
            if len(data) < 50:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, data[: len(data) // 2], offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(OSError, match="No space"):
                ledger.append(0, 1, batch(1))
        ledger.append(0, 2, batch(2))
    assert load(paths, from_step=0).keys() == {(0, 0), (0, 2)}


ACTS: dict[str, Callable[[Ledger, Arrays], object]] = {
    "append": lambda ledger, arrays: ledger.append(0, 1, arrays),
    "settle": lambda ledger, arrays: ledger.settle(),
    "compact": lambda ledger, arrays: ledger.compact(0),
    "close": lambda ledger, arrays: ledger.close(),
}
"""What is not done before the newest record is durable."""


@pytest.mark.parametrize("act", ACTS)
def test_a_failed_fsync_is_raised_by_what_comes_next_and_later_records_go_into_a_new_file(
    paths: RunPaths, batch: Batch, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Ledger(paths, 1, 0) as ledger:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            ledger.append(0, 0, batch(0))
            with pytest.raises(OSError, match="Input/output"):
                ACTS[act](ledger, batch(1))
            patch.setattr(module, "write_file", fail)
            for said in ("Input/output", "takes no records"):  # the second time it is not tried
                with pytest.raises(OSError, match="Bad file" if act == "close" else said):
                    ledger.append(0, 1, batch(1))
        ledger.settle()  # it was said
        if act != "close":
            before, later = os.stat(ledger.path), time.monotonic() + 61
            monkeypatch.setattr(time, "monotonic", lambda: later)
            ledger.append(0, 1, batch(1))
            assert not os.path.samestat(before, os.stat(ledger.path))
    assert load(paths, from_step=0).keys() == ({(0, 0)} if act == "close" else {(0, 0), (0, 1)})
    Ledger(paths, 1, 0).close()  # given back


@pytest.mark.parametrize("act", ACTS)
def test_a_record_becomes_durable_while_its_writer_goes_on_and_before_anything_else_is_done(
    paths: RunPaths, batch: Batch, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    log: list[str] = []
    waited_for = threading.Event()
    pwrite, write_file, close, wait = os.pwrite, module.write_file, os.close, BackgroundSync.wait

    def slow(fd: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert waited_for.wait(60)  # a disk that needs until somebody wants to know
        log.append("durable")

    def tell(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (log.append(name), real(*args))[1]

    def ask(sync: BackgroundSync) -> None:
        waited_for.set()
        wait(sync)

    ledger = Ledger(paths, 1, 0)
    monkeypatch.setattr(os, "fdatasync", slow)
    monkeypatch.setattr(os, "pwrite", tell("write", pwrite))
    monkeypatch.setattr(module, "write_file", tell("replace", write_file))
    ledger.append(0, 0, batch(0))
    assert log == ["write"]
    monkeypatch.setattr(BackgroundSync, "wait", ask)
    monkeypatch.setattr(os, "close", tell("close", close))
    if act == "compact":
        ledger.compact(1)
    else:
        ACTS[act](ledger, batch(1))
    assert log[:2] == ["write", "durable"]
    assert log.count("durable") == 1 or act == "append"
    ledger.close()


def test_the_thread_that_syncs_ends_with_its_ledger(paths: RunPaths, batch: Batch) -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "ledger-sync"}

    before = threads()
    ledger = Ledger(paths, 1, 0)
    assert (
        threads() <= before
    )  # a reader, or one that never appends, has none; one of another test may end now
    ledger.append(0, 0, batch(0))
    (mine,) = threads() - before
    ledger.close()
    del ledger
    gc.collect()
    mine.join(60)
    assert not mine.is_alive()


def test_killed_at_any_operation_every_acknowledged_record_is_there(paths: RunPaths, batch: Batch) -> None:
    nth, code = 0, 9
    while code != 0:
        nth += 1
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _append_and_die(paths, batch, nth, write_end)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            acknowledged = {(nth, j) for j in pipe.read()}
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in {0, 9}
        found = {key for key in load(paths, from_step=0) if key[0] == nth}
        assert acknowledged <= found
        assert len(found) - len(acknowledged) <= 1
    assert nth > 8
    assert len(acknowledged) == 3


def _append_and_die(paths: RunPaths, batch: Batch, nth: int, acknowledge: int) -> None:
    """Append three records to the segment of attempt 1; die at the nth operation, half of a write done."""
    count = [0]
    real_write = os.pwrite

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: object) -> object:
            count[0] += 1
            if count[0] == nth:
                if name == "pwrite":
                    fd, data, offset = args
                    real_write(fd, bytes(data)[: len(data) // 2], offset)  # type: ignore[arg-type]
                os._exit(9)
            return real(*args)

        setattr(os, name, call)

    for name in ("pwrite", "fdatasync", "fsync", "ftruncate"):
        wrap(name)
    with Ledger(paths, 1, 0) as ledger:
        for j in range(3):
            ledger.append(nth, j, batch(j))
            os.write(acknowledge, bytes([j]))


def test_pruning_removes_whole_segments_of_older_attempts_only(paths: RunPaths, batch: Batch) -> None:
    fill(paths, batch, 1, 0, (0, 0), (1, 0))
    fill(paths, batch, 1, 1, (1, 1), (2, 1))
    fill(paths, batch, 2, 0, (1, 2))
    fill(paths, batch, 3, 0, (1, 3))
    with Ledger(paths, 2, 0):
        assert prune(paths, 2, current_attempt=3) == [paths.ledger_segment(1, 0)]
    assert prune(paths, 2, current_attempt=3) == [paths.ledger_segment(2, 0)]
    assert load(paths, from_step=0).keys() == {(1, 1), (2, 1), (1, 3)}
    assert prune(paths, 9) == [paths.ledger_segment(1, 1), paths.ledger_segment(3, 0)]
    assert prune(RunPaths(paths.root / "none"), 1) == []


def test_a_segment_with_damage_is_not_pruned(paths: RunPaths, batch: Batch) -> None:
    sizes = fill(paths, batch, 1, 0, (0, 0), (0, 1), (0, 2))
    segment = paths.ledger_segment(1, 0)
    data = bytearray(segment.read_bytes())
    data[HEAD_BYTES + sizes[0]] ^= 1
    segment.write_bytes(data)
    assert prune(paths, 5) == []


def test_compacting_drops_old_steps_and_appending_goes_on(
    paths: RunPaths, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(paths, 1, 0) as ledger:
        for step in range(4):
            ledger.append(step, 0, batch(step))
        assert ledger.compact(0) == 0
        assert ledger.compact(2) > 0
        ledger.append(4, 0, batch(4))
        monkeypatch.setattr(segment_files, "_PATIENCE_S", 0.0)
        with pytest.raises(SegmentHeld):
            Ledger(paths, 1, 0)
    found = load(paths, from_step=0)
    assert found.keys() == {(2, 0), (3, 0), (4, 0)}
    assert all(equal(arrays, batch(step)) for (step, _), arrays in found.items())


@pytest.mark.parametrize("fails", ["the new file", "its opening"])
def test_a_compaction_that_fails_leaves_no_writer_to_a_file_that_nobody_will_read(
    paths: RunPaths, batch: Batch, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with Ledger(paths, 1, 0) as ledger:
        for step in range(2):
            ledger.append(step, 0, batch(step))
        with monkeypatch.context() as patch:
            if fails == "its opening":
                patch.setattr(Ledger, "_open", fail)
            else:
                patch.setattr(module, "write_file", fail)
            with pytest.raises(OSError, match="Too many"):
                ledger.compact(1)
        ledger.append(2, 0, batch(2))
    assert load(paths, from_step=0).keys() == {(0, 0), (1, 0), (2, 0)}


def test_a_batch_without_a_mask_counts_rows_and_no_tokens(paths: RunPaths) -> None:
    with Ledger(paths, 1, 0) as ledger:
        ledger.append(0, 0, {"sample_id": np.arange(3)})
        ledger.append(0, 1, {})
    assert (ledger_stats(paths).rollouts, ledger_stats(paths).tokens) == (3, 0)


def test_what_is_taken_back_is_loaded_no_more_until_it_is_recorded_anew(
    paths: RunPaths, batch: Batch
) -> None:
    fill(paths, batch, 1, 0, (1, 0), (1, 2))
    fill(paths, batch, 1, 1, (1, 1))
    with Ledger(paths, 2, 0) as ledger:  # of another attempt and rank: nobody writes into another's segment
        for micro_batch in (0, 1):
            ledger.append(1, micro_batch, {})
        ledger.append(1, 0, batch(7))
    told: list[tuple[int, int]] = []
    found = load(paths, from_step=0, taken_back=lambda *key: told.append(key))
    assert found.keys() == {(1, 0), (1, 2)}
    assert equal(found[1, 0], batch(7))
    assert told == [(1, 0), (1, 1)]
    counted = ledger_stats(paths)
    assert (counted.records, counted.duplicates) == (4, ((1, 0),))


@pytest.mark.parametrize("sealed", [False, True])
def test_records_of_another_run_are_not_used_and_that_run_is_named(
    tmp_path: Path, batch: Batch, sealed: bool
) -> None:
    keys = Keyring(MasterKey(bytes(range(32)))) if sealed else None
    ours, other = RunPaths(tmp_path / "ours"), RunPaths(tmp_path / "other")
    for paths, rank in ((ours, 0), (other, 1)):
        with Ledger(paths, 1, rank, keys=keys) as ledger:
            for step in range(3):
                ledger.append(step, 0, batch(rank))
    theirs = other.ledger_segment(1, 1).read_bytes()
    # A whole file copied over, and their records after ours.
    ours.ledger_segment(1, 1).write_bytes(theirs)
    with ours.ledger_segment(1, 0).open("ab") as file:
        file.write(theirs[HEAD_BYTES:])
    said: list[str] = []
    found = load(ours, from_step=0, keys=keys, report=said.append)
    assert [equal(arrays, batch(0)) for arrays in found.values()] == [True] * 3
    assert len(said) == 2
    for line in said:
        assert f"run id {run_id(other)}" in line
        assert f"echo {run_id(other)} > {ours.run_id}" in line
    # The reader of single records, and the writer that goes on, pass over them as well.
    index = Index(ours, type(None), keys=keys, report=said.append)
    assert all(equal((index.read(step, 0) or (None, {}))[1], batch(0)) for step in range(3))
    with Ledger(ours, 1, 0, keys=keys) as ledger:
        ledger.append(3, 0, batch(0))
    assert len(load(ours, from_step=0, keys=keys, report=str)) == 4
    with pytest.raises(CheckpointCorrupt, match=run_id(other)):
        load(ours, from_step=0, keys=keys)


def test_a_foreign_record_that_claims_to_be_ours_does_not_open(tmp_path: Path, batch: Batch) -> None:
    keys = Keyring(MasterKey(bytes(range(32))))
    ours, other = RunPaths(tmp_path / "ours"), RunPaths(tmp_path / "other")
    with Ledger(other, 1, 0, keys=keys) as ledger:
        ledger.append(0, 0, batch(2))
    theirs = other.ledger_segment(1, 0).read_bytes()
    sealed = theirs[HEAD_BYTES + FRAME_BYTES :]
    ours.ledger.mkdir(parents=True)
    ours.ledger_segment(1, 0).write_bytes(head(1, 0) + frame(run_id(ours), 0, 0, sealed, sealed=True))
    said: list[str] = []
    assert load(ours, from_step=0, keys=keys, report=said.append) == {}
    assert "does not open" in said[0]
