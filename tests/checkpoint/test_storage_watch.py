"""What the watch of a medium says, and that it says it once."""

from pathlib import Path

from verl_slurm.checkpoint.decide.storage import FreeSpace, Need, Room, judge_room
from verl_slurm.checkpoint.store.medium import StorageWatch

GB = 10**9


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


def test_after_a_save_the_next_is_expected_to_be_like_it() -> None:
    disk = Disk(9 * GB)
    medium = watch(disk)
    medium.saved(GB, 1.0, num_files=10)
    medium.before_save()
    assert disk.needs[-1].bytes == round(1.1 * GB) + 10 * 4096
    assert disk.needs[-1].basis == "the last save"


def test_slow_failing_and_well_again_are_each_said_once() -> None:
    medium = watch(Disk(9 * GB))
    said = [
        notice.text.partition(":")[0]
        for seconds in (2, 2, 2, 9, 9, 9, 9, 0, 0, 2, 2)
        for notice in (medium.saved(GB, seconds, 1) if seconds else medium.failed("EIO"))
    ]
    assert said == ["shared storage is SLOW", "shared storage is FAILING", "shared storage is well again"]


def test_the_speed_of_earlier_lives_is_the_usual_one() -> None:
    medium = watch(Disk(9 * GB), earlier=[(GB, 2.0)] * 5)
    said = [notice.loud for _ in range(3) for notice in medium.saved(GB, 9.0, 1)]
    assert said == [True]


def test_a_first_save_that_goes_well_is_not_worth_a_word() -> None:
    assert watch(Disk(9 * GB)).saved(GB, 1.0, 1) == ()
