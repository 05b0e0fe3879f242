"""The nodes of a job lose sight of each other: ranks in a save, and lead and agent."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verl_slurm_daemon.link import channel
from verl_slurm_daemon.link.channel import AgentLink, LeadLink, connect, serve

from tests.hostile.lead_port import ATTEMPT, ROOT, TOKEN
from tests.hostile.netlab import ADDRESS, Netlab, netlab
from tests.processes import python_path
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.wire.messages import FromAgent, SaveRequest, SignalSeen, ToAgent

pytestmark = pytest.mark.slow


@pytest.fixture
def lab() -> Iterator[Netlab]:
    with netlab() as found:
        yield found


class Rank:
    """One end of `commit_worker`."""

    def __init__(self, lab: Netlab, root: Path, rank: int) -> None:
        argv = [sys.executable, "-m", "tests.hostile.commit_worker", str(root), str(rank)]
        only_here = {"PYTHONSAFEPATH": "", "GLOO_SOCKET_IFNAME": "veth", "OMP_NUM_THREADS": "1"}
        env = os.environ | python_path() | only_here
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            lab.argv("a" if rank == 0 else "b", argv), cwd=ROOT, env=env, text=True, stdin=pipe, stdout=pipe
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the rank is gone"
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.kill()
        self.process.wait()


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.scenario("N01")
def test_ranks_that_lose_each_other_in_a_save_commit_only_together_and_agree_when_they_meet_again(
    lab: Netlab, tmp_path: Path
) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    ranks = [Rank(lab, paths.root, number) for number in range(2)]
    try:
        for rank in ranks:
            assert rank.hear() == {"at": "start"}
        step = 0
        for part in (lab.cut, lab.one_way):
            for point, who in (("before", [0, 1]), ("in", [1]), ("after", [0])):
                step += 1
                for rank in ranks:
                    rank.tell(f"{step} {point}")
                for number in who:
                    assert ranks[number].hear() == {"at": point}
                part()
                for number in who:
                    ranks[number].tell("go")
                lab.wait_for_losses(3)
                there = (paths.checkpoints / f"step_{step:06d}").exists()
                healed_ns = time.monotonic_ns()
                lab.heal()
                done = [rank.hear() for rank in ranks]
                assert {one["name"] for one in done} == {f"step_{step:06d}"}, "they agree"
                if point == "after":
                    assert there, "what was committed stays"
                    assert done[0]["committed_ns"] < healed_ns < done[1]["done_ns"]
                else:
                    assert not there
                    assert done[0]["committed_ns"] > healed_ns, "committed without the other"
                assert verify(paths.checkpoints / f"step_{step:06d}").ok
        _and_one_that_never_comes_back(lab, paths, ranks, step + 1)
    finally:
        for rank in ranks:
            rank.end()


def _and_one_that_never_comes_back(lab: Netlab, paths: RunPaths, ranks: list[Rank], step: int) -> None:
    for rank in ranks:
        rank.tell(f"{step} in")
    assert ranks[1].hear() == {"at": "in"}
    lab.cut()
    ranks[1].process.kill()  # its node dies out of sight: nobody is told
    ranks[1].process.wait()
    lab.heal()
    assert "failed" in ranks[0].hear()
    left = sorted(path.name for path in paths.checkpoints.iterdir() if path.name.startswith(("step_", ".")))
    assert left == [f"step_{number:06d}" for number in range(1, step)], "neither it nor half of it"


# ---- lead and agent


class Ends:
    """Both ends of one link in this loop, the agent's on the other side of the cable."""

    def __init__(self) -> None:
        self.lead: AgentLink | None = None
        self.agent: LeadLink | None = None
        self.at_lead: asyncio.Queue[FromAgent] = asyncio.Queue()
        self.at_agent: asyncio.Queue[ToAgent] = asyncio.Queue()
        self.lead_ended: asyncio.Event = asyncio.Event()
        self.why = ""
        self.listening: asyncio.Task[None] | None = None

    async def join(self, lab: Netlab) -> asyncio.Server:
        joined = asyncio.Event()

        async def on_link(link: AgentLink) -> None:
            self.lead = link
            joined.set()
            try:
                await link.messages(self.at_lead.put_nowait)
            except OSError as error:
                self.why = type(error).__name__
            self.lead_ended.set()

        server, port = await serve(ADDRESS["a"], TOKEN, ATTEMPT, 4, on_link)
        with lab.inside("b"):  # until the socket is there; then it stays on its side
            joining = asyncio.create_task(connect(ADDRESS["a"], port, TOKEN, ATTEMPT))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.agent = await joining
        await joined.wait()
        self.listening = asyncio.create_task(self.agent.messages(self.at_agent.put_nowait))
        return server


def story(lab: Netlab, tell: Any) -> None:
    async def bounded() -> None:
        ends = Ends()
        async with asyncio.timeout(60):
            server = await ends.join(lab)
            try:
                await tell(ends)
            finally:
                lab.heal()
                server.close()
                assert ends.agent is not None
                assert ends.listening is not None
                await ends.agent.close()
                await asyncio.gather(ends.listening, return_exceptions=True)
                await ends.lead_ended.wait()

    with lab.inside("a"):
        asyncio.run(bounded())


@pytest.mark.scenario("N01")
@pytest.mark.parametrize("part", ["cut", "one_way"])
def test_what_lead_and_agent_said_while_they_were_parted_arrives_once_when_they_meet_again(
    lab: Netlab, part: str
) -> None:
    async def tell(ends: Ends) -> None:
        assert ends.lead is not None
        assert ends.agent is not None
        lab.cut() if part == "cut" else lab.one_way()
        ends.lead.send(SaveRequest(request_id=1, stop=True, seconds_left=30.0))
        ends.agent.send(SignalSeen(node="n1", signal=15))
        await asyncio.to_thread(lab.wait_for_losses, 3)
        assert ends.at_agent.empty()
        lab.heal()
        assert await ends.at_agent.get() == SaveRequest(request_id=1, stop=True, seconds_left=30.0)
        assert await ends.at_lead.get() == SignalSeen(node="n1", signal=15)
        ends.lead.send(SaveRequest(request_id=2, stop=True, seconds_left=30.0))
        assert await ends.at_agent.get() == SaveRequest(request_id=2, stop=True, seconds_left=30.0)
        assert (ends.at_agent.qsize(), ends.at_lead.qsize()) == (0, 0), "something came twice"

    story(lab, tell)


@pytest.mark.scenario("N01")
@pytest.mark.parametrize("talking", [True, False])
def test_a_link_whose_other_end_is_gone_for_good_ends_on_both_sides(
    lab: Netlab, monkeypatch: pytest.MonkeyPatch, talking: bool
) -> None:
    """Whether or not anything is under way. Two seconds here, three minutes in life: the kernel's own clock."""
    monkeypatch.setattr(channel, "_SILENCE_S", 2)

    async def tell(ends: Ends) -> None:
        assert ends.agent is not None
        assert ends.listening is not None
        lab.cut()
        if talking:
            ends.agent.send(SignalSeen(node="n1", signal=15))
        await ends.lead_ended.wait()
        assert ends.why == "TimeoutError"
        with pytest.raises(TimeoutError):
            await ends.listening
        assert ends.at_lead.empty()

    story(lab, tell)
