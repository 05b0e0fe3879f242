"""Who owns a run."""

import errno
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from verl_slurm.base import fence
from verl_slurm.base.errors import CheckpointCorrupt, Fenced
from verl_slurm.base.fence import RunOwner, read_copy, read_owner, require_attempt, take_attempt
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths


def test_each_attempt_gets_the_next_number_and_closes_the_one_before(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    first = take_attempt(paths, job_id="5", restart=0)
    require_attempt(paths, first.attempt)
    second = take_attempt(paths, job_id="5", restart=1)
    assert (first.attempt, second.attempt) == (1, 2)
    with pytest.raises(Fenced, match="no longer owns"):
        require_attempt(paths, first.attempt)


def test_a_run_without_an_attempt_lets_nobody_write(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is RUN's file system mounted"):
        require_attempt(RunPaths(tmp_path), 1)


UNREADABLE = pytest.mark.parametrize("what", ["empty", "zeros", "more than a ledger's head holds"])


def _damage_copy(paths: RunPaths, mine: RunOwner, what: str) -> None:
    huge = msgspec.json.encode(msgspec.structs.replace(mine, attempt=1 << 32))
    paths.attempt.write_bytes({"empty": b"", "zeros": b"\0" * 40}.get(what, huge))


@UNREADABLE
def test_a_copy_that_cannot_be_read_is_refused_by_its_file_where_no_claim_decides(
    tmp_path: Path, what: str
) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    _damage_copy(paths, take_attempt(paths, job_id="5", restart=0), what)
    for claim in paths.control.iterdir():
        claim.write_bytes(b"")
    with pytest.raises(CheckpointCorrupt, match=str(paths.attempt)):
        require_attempt(paths, 1)


@UNREADABLE
def test_beside_a_copy_that_cannot_be_read_the_newest_claim_owns_the_run(tmp_path: Path, what: str) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    first = take_attempt(paths, job_id="1", restart=0)
    second = take_attempt(paths, job_id="2", restart=0)
    _damage_copy(paths, first, what)
    assert read_owner(paths) == second
    require_attempt(paths, 2)
    with pytest.raises(Fenced):
        require_attempt(paths, 1)
    third = take_attempt(paths, job_id="3", restart=0)
    assert (third.attempt, read_copy(paths)) == (3, third)


def _take(root: str, queue: "multiprocessing.Queue[int]") -> None:
    try:
        queue.put(take_attempt(RunPaths(root), job_id=str(os.getpid()), restart=0).attempt)
    except Fenced:
        queue.put(0)


def test_of_many_who_start_at_once_no_two_get_the_same_attempt(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for round_number in range(20):
        root = private_dir(tmp_path / str(round_number))
        queue = context.Queue()
        racers = [context.Process(target=_take, args=(str(root), queue)) for _ in range(4)]
        for racer in racers:
            racer.start()
        attempts = [queue.get(timeout=30) for _ in racers]
        for racer in racers:
            racer.join()
        won = [attempt for attempt in attempts if attempt]
        assert won, "somebody must win"
        assert len(set(won)) == len(won)
        owner = read_owner(RunPaths(root))
        assert owner is not None


@pytest.mark.scenario("C04")
def test_a_run_whose_owner_was_killed_in_mid_claim_is_taken_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path)
    take_attempt(paths, job_id="1", restart=0)
    with monkeypatch.context() as patch:
        patch.setattr(fence, "write_file", _killed_at("attempt"))
        with pytest.raises(KeyboardInterrupt):
            take_attempt(paths, job_id="2", restart=0)
    owner = read_owner(paths)
    assert owner is not None
    assert (owner.attempt, owner.job_id) == (2, "2"), "who is to be asked whether it lives"
    assert take_attempt(paths, job_id="3", restart=0).attempt == 3


def test_a_winner_that_slept_before_it_wrote_the_copy_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path)
    take_attempt(paths, job_id="1", restart=0)

    def sleeps(path: Path, data: bytes) -> None:
        if path == paths.attempt:
            monkeypatch.undo()
            take_attempt(paths, job_id="3", restart=0)
        write_file(path, data)

    monkeypatch.setattr(fence, "write_file", sleeps)
    late = take_attempt(paths, job_id="2", restart=0)
    assert b'"job_id":"2"' in paths.attempt.read_bytes(), "the older one wrote last"
    owner = read_owner(paths)
    assert owner is not None
    assert (late.attempt, owner.attempt, owner.job_id) == (2, 3, "3")
    with pytest.raises(Fenced):
        require_attempt(paths, 2)
    require_attempt(paths, 3)
    assert take_attempt(paths, job_id="4", restart=0).attempt == 4


def test_of_two_that_saw_the_same_owner_end_the_second_is_refused_however_late(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    former = take_attempt(paths, job_id="1", restart=0)
    take_attempt(paths, job_id="2", restart=0, after=former)
    with pytest.raises(Fenced, match="attempt 2 of job 2"):
        take_attempt(paths, job_id="3", restart=0, after=former)


@pytest.mark.scenario("C04")
@pytest.mark.parametrize("taken", ["1970-01-01T00:00:00+00:00", "2099-01-01T00:00:00+00:00"])
def test_how_old_a_claim_is_or_says_it_is_decides_nothing(tmp_path: Path, taken: str) -> None:
    paths = RunPaths(tmp_path)
    former = take_attempt(paths, job_id="1", restart=0)
    gone = msgspec.structs.replace(former, attempt=2, host="a node that is gone", taken=taken)
    claim = paths.control / "attempt_000002.claim"
    claim.write_bytes(msgspec.json.encode(gone))
    for age in (0, 4e9):
        os.utime(claim, (age, age))
        assert read_owner(paths) == gone
        with pytest.raises(Fenced):
            take_attempt(paths, job_id="3", restart=0, after=former)
    assert take_attempt(paths, job_id="3", restart=0, after=gone).attempt == 3


def test_an_empty_claim_of_a_former_version_spoils_its_number_and_no_more(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    first = take_attempt(paths, job_id="1", restart=0)
    (paths.control / "attempt_000002.claim").touch()
    assert read_owner(paths) == first
    assert take_attempt(paths, job_id="2", restart=0).attempt == 3


def test_where_there_are_no_links_one_wins_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    paths = RunPaths(tmp_path)
    former = take_attempt(paths, job_id="1", restart=0)
    take_attempt(paths, job_id="2", restart=0, after=former)
    with pytest.raises(Fenced):
        take_attempt(paths, job_id="3", restart=0, after=former)
    assert list(paths.control.glob("*.tmp")) == []


def test_what_a_claimant_that_was_killed_left_is_swept_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path)
    take_attempt(paths, job_id="1", restart=0)
    left = [paths.control / name for name in ("attempt_000002.0a.tmp", ".attempt_000002.0a.tmp.1b.tmp")]
    other = paths.control / "attempt_000009.0a.tmp"
    for path in (*left, other):
        path.touch()
    take_attempt(paths, job_id="2", restart=0)
    assert [path.exists() for path in (*left, other)] == [False, False, True]


def _killed_at(name: str) -> Callable[[Path, bytes], None]:
    def write(path: Path, data: bytes) -> None:
        if path.name == name:
            raise KeyboardInterrupt
        write_file(path, data)

    return write


def test_without_the_copy_and_older_claims_the_newest_claim_still_owns_the_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for number in range(1, 4):
        take_attempt(paths, job_id=str(number), restart=0)
    paths.attempt.unlink()
    (paths.control / "attempt_000001.claim").unlink()
    require_attempt(paths, 3)
    with pytest.raises(Fenced):
        require_attempt(paths, 2)
    assert take_attempt(paths, job_id="4", restart=0).attempt == 4


def test_a_number_that_was_used_is_not_taken_again_though_its_claim_is_gone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert take_attempt(paths, job_id="1", restart=0, above=2).attempt == 3
    assert take_attempt(paths, job_id="2", restart=0, above=2).attempt == 4
