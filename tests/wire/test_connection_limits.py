"""Which connections get a place at a port, and which lose it."""

import resource
from typing import Any

import pytest

from verl_slurm.base.errors import WireError
from verl_slurm.wire.connection_limits import ROW, ConnectionLimits, make_room


class Line:
    """As much of a transport as the limits want."""

    def __init__(self) -> None:
        self.up = True

    def abort(self) -> None:
        self.up = False

    def get_extra_info(self, name: str) -> tuple[str, int]:
        assert name == "peername"
        return "192.0.2.1", 4711


def test_a_full_row_loses_its_oldest_once_and_counts_him_once() -> None:
    refused: list[str] = []
    limits = ConnectionLimits(2, lambda why, _: refused.append(why))
    lines: list[Any] = [Line() for _ in range(ROW + 2 + 3)]
    for line in lines:
        limits.arrive(line)
    assert [line.up for line in lines] == [False] * 3 + [True] * (ROW + 2)
    limits.turn_away(lines[0], EOFError())  # what its connection ends with
    assert refused == ["crowded"] * 3
    assert not limits.admit(lines[1]), "its proof came too late"


def test_each_reason_has_its_name() -> None:
    refused: list[tuple[str, str]] = []
    limits = ConnectionLimits(1, lambda *who: refused.append(who))
    for error in (WireError("a peer does not know the token"), TimeoutError(), ConnectionResetError()):
        line: Any = Line()
        limits.arrive(line)
        limits.turn_away(line, error)
        assert not line.up
    proven: list[Any] = [Line(), Line(), Line()]
    for line in proven:
        limits.arrive(line)
    assert [limits.admit(line) for line in proven[:2]] == [True, False]
    limits.leave()
    assert limits.admit(proven[2])
    assert refused == [(why, "192.0.2.1") for why in ("token", "silent", "left", "full")]
    assert [line.up for line in proven] == [True, False, True]


def test_room_is_made_for_a_thousand_agents_as_far_as_the_hard_limit_goes() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1200, before[1]))
        make_room(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1200
        make_room(900)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(900 + 1024, before[1])
        make_room(10**9)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_unlimited_process_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("nothing to do"))
    make_room(10**9)
