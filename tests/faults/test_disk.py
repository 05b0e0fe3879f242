"""The model itself: it lets through what POSIX promises, and catches the classic mistakes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.disk import Disk, Make, Remove, Rename, Sync, Write, crash_states, pending
from tests.faults.tracing import Call, Fault, Tracer
from verl_slurm.base.files import fsync_path, private_dir, write_file


def _contents(tmp_path: Path, act: Callable[[], None], name: str = "file") -> set[bytes | None]:
    """What `name` may hold after a crash anywhere in `act`; None: it is not there."""
    with Tracer(tmp_path) as tracer:
        act()
    return {state.tree.get(name) for state in crash_states(tracer.start, tracer.recorded(), num_random=5)}


def test_the_way_this_project_replaces_a_file_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old!")
    assert _contents(tmp_path, lambda: write_file(tmp_path / "file", b"new!")) == {b"old!", b"new!"}


def test_a_file_overwritten_in_place_may_be_torn_or_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old!")
    found = _contents(tmp_path, lambda: (tmp_path / "file").write_bytes(b"new!") and None)
    assert found == {b"old!", b"", b"ne", b"new!"}


def test_a_rename_without_an_fsync_before_it_may_bring_an_empty_file(tmp_path: Path) -> None:
    def replace() -> None:
        (tmp_path / "temp").write_bytes(b"new!")
        (tmp_path / "temp").rename(tmp_path / "file")
        fsync_path(tmp_path)

    (tmp_path / "file").write_bytes(b"old!")
    assert b"" in _contents(tmp_path, replace)


def test_a_rename_without_an_fsync_of_the_directory_may_not_have_been(tmp_path: Path) -> None:
    def replace() -> None:
        (tmp_path / "temp").write_bytes(b"new!")
        fsync_path(tmp_path / "temp")
        (tmp_path / "temp").rename(tmp_path / "file")

    (tmp_path / "file").write_bytes(b"old!")
    with Tracer(tmp_path) as tracer:
        replace()
    last = [
        s.tree.get("file")
        for s in crash_states(tracer.start, tracer.recorded())
        if s.after == len(tracer.ops)
    ]
    assert set(last) == {b"old!", b"new!"}


def test_a_file_whose_directory_has_no_durable_name_is_lost_and_private_dir_gives_it_one(
    tmp_path: Path,
) -> None:
    def bare() -> None:
        (tmp_path / "bare").mkdir()
        write_file(tmp_path / "bare/file", b"new!")

    def private() -> None:
        private_dir(tmp_path / "a/b/c")
        write_file(tmp_path / "a/b/c/file", b"new!")

    for act, name, safe in ((bare, "bare/file", False), (private, "a/b/c/file", True)):
        with Tracer(tmp_path) as tracer:
            act()
        ops = tracer.recorded()
        last = {s.tree.get(name) for s in crash_states(tracer.start, ops) if s.after == len(ops)}
        assert last == ({b"new!"} if safe else {b"new!", None})


def test_an_operation_is_pending_until_all_that_it_touches_is_synced() -> None:
    ops = [
        Make(0, "a", 1, True),
        Make(0, "f", 2, False),
        Write(2, 0, b"xy"),
        Rename(0, "f", 1, "g", 2),
        Sync(2),
        Sync(1),
        Remove(1, "g"),
    ]
    assert pending(ops) == [0, 1, 3, 6]
    assert pending([*ops, Sync(0)]) == [6]
    assert pending([*ops, Sync(0), Sync(1)]) == []


def test_every_combination_that_is_tried_is_one_of_the_states_listed() -> None:
    ops = [Make(0, "f", 1, False), Write(1, 0, b"abcd"), Make(0, "g", 2, False)]
    states = {
        (state.how, frozenset(state.tree.items())) for state in crash_states(Disk(), ops) if state.after == 3
    }
    assert dict(states) == {
        "kill": frozenset({("f", b"abcd"), ("g", b"")}),
        "strict": frozenset(),
        "journal": frozenset(),
        "names": frozenset({("f", b""), ("g", b"")}),
        "without 0": frozenset({("g", b"")}),
        "without 1": frozenset({("f", b""), ("g", b"")}),
        "without 2": frozenset({("f", b"abcd")}),
        "only 0": frozenset({("f", b"")}),
        "only 1": frozenset(),
        "only 2": frozenset({("g", b"")}),
    }


def test_a_write_that_the_tracer_does_not_see_is_found(tmp_path: Path) -> None:
    with Tracer(tmp_path) as tracer:
        os.posix_spawn("/bin/sh", ["/bin/sh", "-c", f"echo x > {tmp_path}/unseen"], {})
        os.wait()
    with pytest.raises(AssertionError, match="unseen"):
        tracer.recorded()


@pytest.mark.parametrize("for_ever", [False, True])
def test_a_fault_comes_where_it_was_ordered_and_stays_where_it_is_for_ever(
    tmp_path: Path, for_ever: bool
) -> None:
    fault = Fault(Call("fsync", "file", 1), 5, for_ever)
    with Tracer(tmp_path, fault) as tracer:
        fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT, 0o600)
        with pytest.raises(OSError):
            os.fsync(fd)
        if for_ever:
            with pytest.raises(OSError):
                os.write(fd, b"x")
        else:
            os.write(fd, b"x")
        os.close(fd)
    assert tracer.hits == 1 + for_ever
