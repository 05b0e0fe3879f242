"""Room, speed and health of a medium: verdicts from numbers, and the one question to the system."""

import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from verl_slurm.checkpoint.decide.storage import (
    FreeSpace,
    HealthKind,
    Need,
    Outcome,
    Room,
    judge_health,
    judge_room,
    need_of_next,
    usual_speed,
)
from verl_slurm.checkpoint.store.medium import StorageWatch, free_space, room_for

GB = 10**9
NEED = Need(bytes=2 * GB, inodes=20, basis="the last save")


@pytest.mark.parametrize(
    ("says", "free", "enough", "reason"),
    [
        (
            "there is room, as far as the file system knows",
            FreeSpace(bytes=5 * GB, inodes=99),
            True,
            "5 GB free, 2 GB needed (the last save); quotas are not seen",
        ),
        (
            "there is not",
            FreeSpace(bytes=10**8, inodes=99),
            False,
            "100 MB free, 2 GB needed (the last save)",
        ),
        (
            "bytes, but no inodes",
            FreeSpace(bytes=5 * GB, inodes=3),
            False,
            "3 inodes free, 20 needed (the last save)",
        ),
        (
            "a file system that does not count inodes",
            FreeSpace(bytes=5 * GB),
            True,
            "5 GB free, 2 GB needed (the last save); quotas are not seen",
        ),
        ("one that counts nothing", FreeSpace(), None, "the file system does not say how much is free"),
        ("one that counts inodes only", FreeSpace(inodes=99), None, "the file system counts inodes only"),
        ("one that did not answer", FreeSpace(problem="stale"), None, "stale"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_whether_there_is_room(says: str, free: FreeSpace, enough: bool | None, reason: str) -> None:
    room = judge_room(free, NEED)
    assert (room.enough, room.reason) == (enough, reason), says


def test_what_the_next_save_needs_is_the_last_and_a_margin_and_its_blocks() -> None:
    need = need_of_next(1000, 10)
    assert (need.bytes, need.inodes, need.basis) == (1100 + 10 * 4096, 26, "the last save")
    more = need_of_next(1000, 10, copies=3, basis="an estimate")
    assert (more.bytes, more.inodes) == (3 * need.bytes, 3 * need.inodes)
    assert more.basis == "3 checkpoints like an estimate"


def saves(*seconds: float, num_bytes: int = GB) -> list[Outcome]:
    return [Outcome(num_bytes=num_bytes, seconds=one) for one in seconds]


FULL = Outcome(error="OSError: [Errno 28] No space left on device")


@pytest.mark.parametrize(
    ("says", "outcomes", "kind"),
    [
        ("nothing is known", [], "unknown"),
        ("too little is known", saves(2, 2, 2, 9, 9), "unknown"),
        ("as ever", saves(2, 2, 2, 2, 3, 2), "well"),
        ("one slow save is none", saves(2, 2, 2, 2, 2, 9), "well"),
        ("two in a row are none", saves(2, 2, 2, 2, 9, 9), "well"),
        ("three in a row are slow", saves(2, 2, 2, 9, 9, 9), "slow"),
        ("half its speed is not yet slow", saves(2, 2, 2, 4, 4, 4), "well"),
        ("one as ever ends it", saves(2, 2, 2, 9, 9, 9, 2), "well"),
        ("faster than ever is well", saves(2, 2, 2, 1, 1, 1), "well"),
        ("small saves that lost less than a second", saves(*[0.1] * 3, *[0.9] * 3, num_bytes=9), "well"),
        ("the last one failed", [*saves(2, 2, 2, 2, 2, 2), FULL], "failing"),
        ("the first one failed", [FULL], "failing"),
        ("one that went well after it ends it", [*saves(2, 2, 2, 2, 2), FULL, *saves(2)], "well"),
        (
            "a failure between slow saves does not hide them",
            [*saves(2, 2, 2, 9, 9), FULL, *saves(9)],
            "slow",
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_how_well_a_medium_is(says: str, outcomes: list[Outcome], kind: HealthKind) -> None:
    health = judge_health(outcomes)
    assert health.kind == kind, says
    words = {
        "slow": "a second, less than 0.5 of its usual 500 MB, for 3 saves in a row",
        "failing": "the last save failed: OSError: [Errno 28] No space left on device",
    }
    assert words.get(kind, "") in health.reason


outcomes_st = st.lists(
    st.builds(
        Outcome,
        num_bytes=st.integers(0, 10**15),
        seconds=st.floats(0.0, 1e9),
        error=st.sampled_from(["", "", "", "EIO"]),
    ),
    max_size=40,
)


@given(outcomes_st)
def test_every_history_has_a_verdict_and_failing_is_exactly_a_last_error(outcomes: list[Outcome]) -> None:
    health = judge_health(outcomes)
    assert health.reason
    assert (health.kind == "failing") is bool(outcomes and outcomes[-1].error)
    speed = usual_speed(outcomes)
    assert speed is None or speed > 0.0


def test_the_system_is_asked_about_the_nearest_directory_there_is(tmp_path: Path) -> None:
    asked = free_space(tmp_path / "not" / "there" / "yet")
    assert asked.device == tmp_path.stat().st_dev
    assert room_for(tmp_path, Need(bytes=1, inodes=1, basis="a byte")).enough
    assert room_for(tmp_path, Need(bytes=10**20, inodes=1, basis="too much")).enough is False
    assert room_for(Path("/proc"), NEED).enough is None, "a kernel's file system counts nothing"


def test_a_system_that_cannot_be_asked_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(_: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "statvfs", stale)
    room = room_for(tmp_path, NEED)
    assert room.enough is None
    assert room.reason == f"{tmp_path} could not be asked: Stale file handle"


# ---- what the watch of a medium says, and that it says it once


class Disk:
    """So much is free on it; remembers what it was asked."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.needs: list[Need] = []

    def ask(self, _: Path, need: Need) -> Room:
        self.needs.append(need)
        return judge_room(FreeSpace(bytes=self.free), need)


def watch(disk: Disk, earlier: list[tuple[int, float]] | None = None) -> StorageWatch:
    estimate = Need(bytes=3 * GB, inodes=1, basis="models and optimizers")
    return StorageWatch("shared storage", Path("/x"), estimate=estimate, earlier=earlier or [], ask=disk.ask)


def test_a_full_disk_is_said_once_loudly_and_so_is_its_end_quietly() -> None:
    disk = Disk(GB)
    medium = watch(disk)
    (notice,) = medium.before_save()
    assert notice.loud
    assert notice.text == (
        "shared storage has no room for the next save: 1 GB free, 3 GB needed (models and optimizers)"
    )
    assert medium.before_save() == ()
    disk.free = 9 * GB
    (notice,) = medium.before_save()
    assert not notice.loud
    assert notice.text.startswith("shared storage has room again: 9 GB free")
    assert medium.before_save() == ()
    medium.saved(GB, 1.0, num_files=10)
    medium.before_save()
    assert disk.needs[-1] == need_of_next(GB, 10), "the next save is expected to be like the last"


def test_slow_failing_and_well_again_are_each_said_once() -> None:
    medium = watch(Disk(9 * GB))
    said = [
        notice.text.partition(":")[0]
        for seconds in (2, 2, 2, 9, 9, 9, 9, 0, 0, 2, 2)
        for notice in (medium.saved(GB, seconds, 1) if seconds else medium.failed("EIO"))
    ]
    assert said == ["shared storage is SLOW", "shared storage is FAILING", "shared storage is well again"]


def test_the_speed_of_earlier_lives_is_the_usual_one_and_a_first_save_is_not_worth_a_word() -> None:
    medium = watch(Disk(9 * GB), earlier=[(GB, 2.0)] * 5)
    said = [notice.loud for _ in range(3) for notice in medium.saved(GB, 9.0, 1)]
    assert said == [True]
    assert watch(Disk(9 * GB)).saved(GB, 1.0, 1) == ()
