"""All ranks draw the same conclusion at the same safe point, whatever each has seen so far."""

from collections.abc import Callable, Sequence

from tests.fakes.daemon import Daemon
from verl_slurm.wire.messages import SaveRequest
from verl_slurm.wire.stopping import _NO_HURRY, Stopper


def _request(request_id: int, *, stop: bool, seconds_left: float | None = None) -> SaveRequest:
    return SaveRequest(request_id=request_id, stop=stop, seconds_left=seconds_left)


def _alone(values: Sequence[int]) -> list[int]:
    return list(values)


class Together:
    """Stoppers of several ranks; `agree` runs them as if their all-reduce met."""

    def __init__(self, world_size: int) -> None:
        self.pages = [Daemon() for _ in range(world_size)]
        self._offers: list[Sequence[int]] = []
        self._result: list[int] = []
        self._stoppers = [Stopper(page, self._offer()) for page in self.pages]

    def _offer(self) -> Callable[[Sequence[int]], list[int]]:
        return lambda values: self._offers.append(values) or self._result  # type: ignore[func-returns-value]

    def agree(self) -> list[SaveRequest | None]:
        readings = [page.asked for page in self.pages]
        mine = [
            (0, 0, 0, _NO_HURRY) if r is None else (r.request_id, r.request_id if r.stop else 0, 0, _NO_HURRY)
            for r in readings
        ]
        self._result = [max(column) for column in zip(*mine, strict=True)]
        self._offers.clear()
        orders = [stopper.agree().request for stopper in self._stoppers]
        assert self._offers == mine
        return orders


def test_nothing_asked_means_train_on_and_a_request_is_obeyed_once() -> None:
    stopper = Stopper(Daemon(), _alone)
    assert stopper.agree().request is None
    assert stopper.agree().request is None
    page = Daemon()
    stopper = Stopper(page, _alone)
    page.asked = _request(1, stop=False)
    assert stopper.agree().request == _request(1, stop=False)
    assert stopper.agree().request is None
    page.asked = _request(2, stop=True)
    assert stopper.agree().request == _request(2, stop=True)


def test_a_rank_that_sees_the_request_late_obeys_with_the_others_and_once() -> None:
    ranks = Together(3)
    ranks.pages[2].asked = _request(1, stop=True)
    assert ranks.agree() == [_request(1, stop=True)] * 3
    ranks = Together(2)
    ranks.pages[0].asked = _request(1, stop=False)
    assert ranks.agree() == [_request(1, stop=False)] * 2
    ranks.pages[1].asked = _request(1, stop=False)
    assert ranks.agree() == [None, None]


def test_a_stop_is_not_lost_when_other_ranks_already_see_a_newer_request() -> None:
    ranks = Together(2)
    ranks.pages[0].asked = _request(1, stop=True)
    ranks.pages[1].asked = _request(2, stop=False)
    assert ranks.agree() == [_request(2, stop=True)] * 2


def test_a_stop_that_was_obeyed_does_not_colour_a_later_save() -> None:
    ranks = Together(2)
    ranks.pages[0].asked = ranks.pages[1].asked = _request(1, stop=True)
    ranks.agree()
    ranks.pages[0].asked = _request(2, stop=False)
    assert ranks.agree() == [_request(2, stop=False)] * 2


def test_the_time_that_is_left_is_that_of_the_node_where_it_is_least() -> None:
    page = Daemon()
    page.asked = _request(1, stop=True, seconds_left=8.0)

    def others_have_less(values: Sequence[int]) -> list[int]:
        return [max(a, b) for a, b in zip(values, (1, 1, 0, -2500), strict=True)]

    assert Stopper(page, others_have_less).agree().request == _request(1, stop=True, seconds_left=2.5)
    assert Stopper(page, _alone).agree().request == _request(1, stop=True, seconds_left=8.0)
    page.asked = _request(1, stop=True, seconds_left=-1.0)
    assert Stopper(page, _alone).agree().request == _request(1, stop=True, seconds_left=0.0)
