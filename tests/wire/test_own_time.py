"""The time that a rank reports as its own: not that in which it waited for the others at a safe point."""

import socket
import time
from pathlib import Path

import msgspec
import pytest

from verl_slurm.wire import client as module
from verl_slurm.wire.client import RankClient
from verl_slurm.wire.control_page import ControlPage
from verl_slurm.wire.messages import FromRank, Progress
from verl_slurm.wire.stopping import Stopper


class Clock:
    """Seconds as a test has them pass."""

    now = 100.0


def test_a_rank_reports_its_work_without_the_wait_for_slower_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page = ControlPage.create(tmp_path / "page")
    rank = RankClient(ours, page)
    waits_s = 0.0

    def greatest(mine: object) -> list[int]:
        Clock.now += waits_s
        return [0, 0, 0, 0]

    stopper = Stopper(rank, greatest)

    def told() -> float:
        rank.send(Progress(rank=0, step=1, phase="generate", index=0, safe_points=1, new_rollouts=0))
        message = msgspec.msgpack.decode(theirs.recv(module.MAX_MESSAGE), type=FromRank)
        assert isinstance(message, Progress)
        return message.own_s

    assert told() == 0.0
    waits_s = 50.0  # for ranks that still load their models
    stopper.agree()
    Clock.now += 3.0
    waits_s = 7.0
    stopper.agree()
    Clock.now += 2.0
    assert told() == 5.0
    rank.close()
    theirs.close()
