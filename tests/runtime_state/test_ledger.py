import errno
import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.ledger_stats import ledger_stats
from tests.runtime_state.conftest import batch_of
from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
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


@dataclass
class Written:
    """A record as it was acknowledged; `seed` None: it takes an earlier one back."""

    key: tuple[int, int]
    seed: int | None
    num_bytes: int
    damaged: bool = False


class Life:
    """A run's ledger, and what of it a reader has to find, whatever happens to the files."""

    def __init__(self, paths: RunPaths, keys: Keyring | None) -> None:
        self.paths, self.keys = paths, keys
        self.segments: dict[tuple[int, int], list[Written]] = {}

    def append(self, where: tuple[int, int], key: tuple[int, int], seed: int | None) -> None:
        """By a process that starts, writes and ends: a torn tail is cut."""
        records = self.segments.setdefault(where, [])
        with Ledger(self.paths, *where, keys=self.keys) as ledger:
            while records and records[-1].damaged:
                records.pop()
            num_bytes = ledger.append(*key, {} if seed is None else batch_of(seed))
        records.append(Written(key, seed, num_bytes))

    def compact(self, where: tuple[int, int], before_step: int) -> None:
        with Ledger(self.paths, *where, keys=self.keys) as ledger:
            ledger.compact(before_step)
        self.segments[where] = [
            one for one in self.segments[where] if one.key[0] >= before_step and not one.damaged
        ]

    def tear(self, where: tuple[int, int], size: int, tail: bytes) -> None:
        """A kill in the middle of a write, or a node that is lost with what the kernel held."""
        segment = self.paths.ledger_segment(*where)
        size = min(size, segment.stat().st_size)
        segment.write_bytes(segment.read_bytes()[:size] + tail)
        end, kept = HEAD_BYTES, []
        for one in self.segments[where]:
            end += one.num_bytes
            if end <= size:
                kept.append(one)
        self.segments[where] = kept

    def flip(self, where: tuple[int, int], number: int, bit: int) -> None:
        segment, records = self.paths.ledger_segment(*where), self.segments[where]
        one = records[number % len(records)]
        if one.damaged:
            return
        at = HEAD_BYTES + sum(other.num_bytes for other in records[: number % len(records)])
        data = bytearray(segment.read_bytes())
        data[at + bit // 8 % one.num_bytes] ^= 1 << bit % 8
        segment.write_bytes(data)
        one.damaged = True

    def expected(self) -> tuple[dict[tuple[int, int], int], int]:
        """The seeds by key, and the number of damaged regions with whole records after them."""
        found: dict[tuple[int, int], int] = {}
        regions = 0
        for where in sorted(self.segments):
            before = False
            for one in self.segments[where]:
                if one.damaged:
                    before = True
                    continue
                regions, before = regions + before, False
                if one.seed is None:
                    found.pop(one.key, None)
                else:
                    found[one.key] = one.seed
        return found, regions


_PLACES = st.tuples(st.integers(1, 3), st.integers(0, 1))
_KEYS = st.tuples(st.integers(0, 3), st.integers(0, 2))
_TAILS = [b"", bytes(400), b"VSLR" * 70]
_DEEDS = st.one_of(
    st.tuples(st.just("append"), _PLACES, _KEYS, st.one_of(st.none(), st.integers(0, 9), st.integers(0, 9))),
    st.tuples(st.just("compact"), _PLACES, st.integers(0, 4)),
    st.tuples(
        st.just("tear"),
        _PLACES,
        st.integers(HEAD_BYTES, 3000),
        st.sampled_from([b"", bytes(400), b"VSLR" * 70]),
    ),
    st.tuples(st.just("flip"), _PLACES, st.integers(0, 5), st.integers(0, 10_000)),
)


@given(sealed=st.booleans(), deeds=st.lists(_DEEDS, min_size=1, max_size=14), from_step=st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_what_is_read_is_what_was_written_and_not_torn_damaged_or_taken_back(
    tmp_path_factory: pytest.TempPathFactory, sealed: bool, deeds: list[Any], from_step: int
) -> None:
    """Over attempts, ranks, restarts, kills, lost tails, flipped bits and compactions; the newest attempt counts."""
    life = Life(
        RunPaths(tmp_path_factory.mktemp("run")), Keyring(MasterKey(bytes(range(32)))) if sealed else None
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda fd: None)
        for what, where, *more in deeds:
            if what == "append" or life.segments.get(where):
                getattr(life, what)(where, *more)
    expected, regions = life.expected()
    lines: list[str] = []
    found = load(life.paths, from_step=0, keys=life.keys, report=lines.append)
    assert found.keys() == expected.keys()
    assert all(equal(arrays, batch_of(expected[key])) for key, arrays in found.items())
    assert len(lines) == regions
    if regions:
        with pytest.raises(CheckpointCorrupt, match="bytes "):
            load(life.paths, from_step=0, keys=life.keys)
    later = load(life.paths, from_step=from_step, keys=life.keys, report=lambda line: None)
    assert later.keys() == {key for key in expected if key[0] >= from_step}


def test_segments_are_private(paths: RunPaths, batch: Batch) -> None:
    fill(paths, batch, 1, 0, (0, 0))
    assert paths.ledger.stat().st_mode & 0o777 == 0o700
    assert paths.ledger_segment(1, 0).stat().st_mode & 0o777 == 0o600


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


def test_a_head_that_was_torn_is_written_anew(paths: RunPaths, batch: Batch) -> None:
    for torn_head in (b"", b"VSLE"):
        fill(paths, batch, 1, 0, (0, 0))
        paths.ledger_segment(1, 0).write_bytes(torn_head)
        fill(paths, batch, 1, 0, (3, 0))
        assert load(paths, from_step=0).keys() == {(3, 0)}


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
    with Ledger(paths, 1, 0), pytest.raises(SegmentHeld, match="waited 10 s") as caught:
        Ledger(paths, 1, 0)
    assert caught.value.exit_code is ExitCode.INTERNAL  # a crash, to be tried again: nobody fenced us off
    assert 10 <= clock[0] < 11
    Ledger(paths, 1, 0).close()


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


def test_pruning_removes_whole_segments_of_older_attempts_without_damage_only(
    paths: RunPaths, batch: Batch
) -> None:
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
    sizes = fill(paths, batch, 4, 0, (0, 0), (0, 1), (0, 2))
    data = bytearray(paths.ledger_segment(4, 0).read_bytes())
    data[HEAD_BYTES + sizes[0]] ^= 1
    paths.ledger_segment(4, 0).write_bytes(data)
    assert prune(paths, 5) == [], "one with damage stays"


def test_a_compacted_segment_is_still_locked(
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
    assert load(paths, from_step=0).keys() == {(2, 0), (3, 0), (4, 0)}


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
    ours, other = (RunPaths(private_dir(tmp_path / name)) for name in ("ours", "other"))
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
    ours, other = (RunPaths(private_dir(tmp_path / name)) for name in ("ours", "other"))
    with Ledger(other, 1, 0, keys=keys) as ledger:
        ledger.append(0, 0, batch(2))
    theirs = other.ledger_segment(1, 0).read_bytes()
    sealed = theirs[HEAD_BYTES + FRAME_BYTES :]
    ours.ledger.mkdir(parents=True)
    ours.ledger_segment(1, 0).write_bytes(head(1, 0) + frame(run_id(ours), 0, 0, sealed, sealed=True))
    said: list[str] = []
    assert load(ours, from_step=0, keys=keys, report=said.append) == {}
    assert "does not open" in said[0]
