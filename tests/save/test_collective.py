"""Ranks agree and fail as one: three threads, each with a process group over one store."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from verl_slurm.save.ranks.collective import Collective, RanksFailed

pytestmark = pytest.mark.torch

WORLD = 3


def _on_all_ranks(work: Callable[[Collective], Any]) -> list[Any]:
    """`work` on every rank at once; what it returned or raised, by rank."""
    store = dist.HashStore()
    results: list[Any] = [None] * WORLD

    def rank(number: int) -> None:
        group = dist.ProcessGroupGloo(store, number, WORLD)
        try:
            results[number] = work(_Threaded(group, number))
        except Exception as error:  # noqa: BLE001 - handed to the test
            results[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


class _Threaded(Collective):
    """A Collective on a group that is not registered with torch (one process holds all ranks)."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self.rank, self.world_size = group, rank, WORLD


@pytest.fixture(autouse=True)
def plain_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of torch.distributed want registered groups; a group's own methods do not."""

    def all_reduce(tensor: Any, *, op: Any, group: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        group.allreduce([tensor], options).wait()

    def all_gather(outputs: list[Any], tensor: Any, *, group: Any) -> None:
        group.allgather([outputs], [tensor]).wait()

    def all_to_all_single(output: Any, given: Any, coming: Any, going: Any, *, group: Any) -> None:
        group.alltoall_base(output, given, coming, going, dist.AllToAllOptions()).wait()

    def gather(tensor: Any, outputs: list[Any] | None, *, group: Any, group_dst: int) -> None:
        options = dist.GatherOptions()
        options.rootRank = group_dst
        group.gather([outputs] if outputs is not None else [], [tensor], options).wait()

    def broadcast(tensor: Any, *, group: Any, group_src: int) -> None:
        group.broadcast(tensor, group_src).wait()

    monkeypatch.setattr(dist, "gather", gather)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather", all_gather)


def test_the_greatest_and_the_sum_are_the_same_on_all_ranks() -> None:
    assert _on_all_ranks(lambda ranks: ranks.max([ranks.rank, 7 - ranks.rank])) == [[2, 7]] * WORLD
    total = 0.1 + 0.1 / 2 + 0.1 / 3
    assert _on_all_ranks(lambda ranks: ranks.sum([0.1 / (ranks.rank + 1)])) == [[total]] * WORLD


def test_bytes_of_any_length_are_gathered_in_rank_order() -> None:
    for sizes in ((0, 0, 0), (3, 0, 70000)):
        expected = [bytes([rank]) * size for rank, size in enumerate(sizes)]
        gathered = _on_all_ranks(lambda ranks, parts=expected: ranks.gather(parts[ranks.rank]))  # type: ignore[misc]
        assert gathered == [expected] * WORLD


def test_what_grows_with_the_ranks_is_gathered_on_the_first_alone() -> None:
    for sizes in ((0, 0, 0), (3, 0, 70000)):
        expected = [bytes([rank]) * size for rank, size in enumerate(sizes)]
        gathered = _on_all_ranks(lambda ranks, parts=expected: ranks.gather_to_first(parts[ranks.rank]))  # type: ignore[misc]
        assert gathered == [expected, [], []]


def test_what_the_first_rank_says_takes_the_room_of_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest of 10,000 ranks has 6 MB: a gather of it would take 64 GB of each rank."""
    room: list[int] = []
    real = dist.all_gather

    def all_gather(outputs: list[Any], tensor: Any, *, group: Any) -> None:
        room.append(sum(output.numel() * output.element_size() for output in outputs))
        real(outputs, tensor, group=group)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    assert (
        _on_all_ranks(lambda ranks: ranks.on_first("naming", lambda: bytes(1 << 20), bytes))
        == [bytes(1 << 20)] * WORLD
    )
    assert max(room) <= 8 * WORLD, "lengths alone"


def test_rows_go_to_whom_they_are_for() -> None:
    """Rank r has r rows for each other rank, and none for itself: (r, to whom)."""

    def work(ranks: Collective) -> list[list[int]]:
        going = [0 if rank == ranks.rank else ranks.rank for rank in range(WORLD)]
        coming = [0 if rank == ranks.rank else rank for rank in range(WORLD)]
        rows = [[ranks.rank, to] for to, num in enumerate(going) for _ in range(num)]
        given = torch.tensor(rows, dtype=torch.uint8).reshape(len(rows), 2)
        return ranks.exchange(given, going, coming).tolist()  # type: ignore[no-any-return]

    assert _on_all_ranks(work) == [
        [[1, 0], [2, 0], [2, 0]],
        [[2, 1], [2, 1]],
        [[1, 2]],
    ]


def test_when_one_rank_fails_all_raise_and_name_it() -> None:
    def work(ranks: Collective) -> int:
        def part() -> int:
            if ranks.rank == 1:
                raise OSError("disk full")
            return ranks.rank

        return ranks.together("saving", part)

    for error in _on_all_ranks(work):
        assert isinstance(error, RanksFailed)
        assert "rank 1: OSError: disk full" in str(error)
        assert error.kinds == {"OSError"}


def test_the_first_rank_works_for_all() -> None:
    seen = []

    def work(ranks: Collective) -> list[int]:
        ranks.first_does("noting", lambda: seen.append(ranks.rank))
        return ranks.on_first("naming", lambda: [ranks.rank, 7], list[int])

    assert _on_all_ranks(work) == [[0, 7]] * WORLD
    assert seen == [0]


def test_each_rank_gets_the_values_of_all() -> None:
    assert (
        _on_all_ranks(lambda ranks: ranks.values((ranks.rank, "x"), tuple[int, str]))
        == [[(rank, "x") for rank in range(WORLD)]] * WORLD
    )


def test_a_single_process_needs_no_group() -> None:
    alone = Collective(None)
    assert (alone.max([3]), alone.sum([0.5]), alone.gather(b"x")) == ([3], [0.5], [b"x"])
    assert alone.gather_to_first(b"x") == [b"x"]
    assert alone.exchange(torch.ones(2, 1), [2], [2]).tolist() == [[1.0], [1.0]]
    with pytest.raises(RanksFailed, match="rank 0: ValueError"):
        alone.together("it", lambda: int("no"))
