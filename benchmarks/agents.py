"""How long an emergency request takes to reach all agents of a large job: from the lead's decision to the last receipt.

    python benchmarks/agents.py [--agents 64 1024 4096] [--rounds 20] [--processes 4] [--figure FILE.svg] [--json]

The lead's own half (`Effects`, its port, its policy) in this process, and as many agents' links in a few others, each
a TCP connection of its own over the loopback, with handshake and MACs. Twice: in silence, and while every agent tells
of a rank's progress once a second, which the lead decides upon. What a network adds is not in it: half a round trip.

Both clocks are the machine's monotonic one. All share this machine's processors: look at the load beside the figures.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "daemon")]

from verl_slurm_daemon.allocation.local import LocalAllocation
from verl_slurm_daemon.decide import actions as act, inputs
from verl_slurm_daemon.decide.lead_model import Limits, Model
from verl_slurm_daemon.decide.policy import decide
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.attempt import Attempt
from verl_slurm_daemon.lead.effects import Effects
from verl_slurm_daemon.link.channel import LeadLink, reach_lead

from benchmarks.curves import lines
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import DistributedConfig, RunConfig
from verl_slurm.wire.lead_file import LeadAddress, read_lead_address
from verl_slurm.wire.messages import AgentReady, Progress, SaveRequest, ToAgent

ATTEMPT = 1
GRACE_S = 30.0


class Crowd:
    """The agents of one process. Says on its output when all have joined, and when all have got a request."""

    def __init__(self, first: int, number: int) -> None:
        self._first, self._number = first, number
        self._links: list[LeadLink] = []
        self._got: dict[int, list[int]] = {}
        self._chatter: list[asyncio.TimerHandle] = []

    async def live(self, address: LeadAddress) -> None:
        ids = range(self._first, self._first + self._number)
        self._links = list(await asyncio.gather(*(self._join(address, node_id) for node_id in ids)))
        tasks = [asyncio.create_task(link.messages(self._hear)) for link in self._links]
        print(json.dumps({"joined": self._number}), flush=True)
        loop, commands = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        while await commands.readline():  # the word to begin to talk; the end of the input is the end
            for place, link in enumerate(self._links):  # not all in one instant
                loop.call_later(place / self._number, self._talk, link, self._first + place)
        for task in tasks:
            task.cancel()
        for link in self._links:
            await link.close()

    async def _join(self, address: LeadAddress, node_id: int) -> LeadLink:
        # As an agent: thousands at once are more than a lead greets in its time limit.
        link = await reach_lead(address, ATTEMPT, asyncio.Event())
        link.send(AgentReady(node=f"n{node_id}", node_id=node_id, address=link.own_host, free_port=29500))
        return link

    def _hear(self, message: ToAgent) -> None:
        now = time.monotonic_ns()
        if isinstance(message, SaveRequest):
            got = self._got.setdefault(message.request_id, [])
            got.append(now)
            if len(got) == self._number:
                print(json.dumps({"request": message.request_id, "last_ns": max(got)}), flush=True)

    def _talk(self, link: LeadLink, rank: int) -> None:
        link.send(Progress(rank=rank, step=1, phase="generate", index=0, safe_points=1, new_rollouts=1))
        asyncio.get_running_loop().call_later(1.0, self._talk, link, rank)


async def measure(agents: int, rounds: int, processes: int, root: Path) -> dict[str, Any]:
    """The figures; milliseconds."""
    paths = RunPaths(root)
    private_dir(paths.control)
    config = RunConfig(distributed=DistributedConfig(nodes=agents, dp_size=agents))
    posted: asyncio.Queue[inputs.Input] = asyncio.Queue()
    journal = Journal(paths, attempt=ATTEMPT, job_id="benchmark")
    effects = Effects(Attempt(config, LocalAllocation(config, paths), journal, posted.put_nowait))
    await effects.open()
    deciding = asyncio.create_task(_decide(config, posted))
    crowds: list[asyncio.subprocess.Process] = []
    began = time.monotonic()
    try:
        for place in range(processes):
            first, last = (agents * end // processes for end in (place, place + 1))
            crowds.append(await _start(root, first, last - first))
        await asyncio.gather(*(_line(crowd) for crowd in crowds))
        await effects.restarts.step.all_ready.wait()
        found: dict[str, Any] = {"agents": agents, "joined_s": round(time.monotonic() - began, 2)}
        found["silent"] = await _rounds(effects, crowds, range(1, rounds + 1))
        for crowd in crowds:
            assert crowd.stdin is not None
            crowd.stdin.write(b"talk\n")
        await asyncio.sleep(1.0)  # until each has begun
        found["talking"] = await _rounds(effects, crowds, range(rounds + 1, 2 * rounds + 1))
        assert not deciding.done(), deciding.exception()
        found["load"] = [round(number, 2) for number in os.getloadavg()]
        return found
    finally:
        for crowd in crowds:
            assert crowd.stdin is not None
            crowd.stdin.close()
        for crowd in crowds:
            await crowd.wait()
        deciding.cancel()
        await effects.close()


async def _start(root: Path, first: int, number: int) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    argv = [sys.executable, __file__, "--crowd", str(root), str(first), str(number)]
    return await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)


async def _line(crowd: asyncio.subprocess.Process) -> dict[str, Any]:
    assert crowd.stdout is not None
    found: dict[str, Any] = json.loads(await crowd.stdout.readline())
    return found


async def _decide(config: RunConfig, posted: "asyncio.Queue[inputs.Input]") -> None:
    """As the lead: what each message means. What follows from it is not done."""
    daemon = config.daemon
    limits = Limits(
        crash_budget=daemon.crash_budget,
        backoff_s=daemon.backoff_s,
        no_progress_limit=daemon.no_progress_limit,
        hang_budget=daemon.hang_budget,
        node_budget=daemon.node_budget,
    )
    model = decide(Model(limits), inputs.Ready(config.distributed.world_size)).model
    while True:
        model = decide(model, await posted.get()).model


async def _rounds(
    effects: Effects, crowds: list[asyncio.subprocess.Process], requests: range
) -> dict[str, Any]:
    took = []
    for request in requests:
        began = time.monotonic_ns()
        effects.perform(act.SaveRequest(request_id=request, stop=True, seconds_left=GRACE_S))
        said = await asyncio.gather(*(_line(crowd) for crowd in crowds))
        assert {one["request"] for one in said} == {request}
        took.append((max(one["last_ns"] for one in said) - began) / 1e6)
    return {
        "rounds": len(took),
        "median_ms": round(statistics.median(took), 1),
        "max_ms": round(max(took), 1),
    }


def figure(found: list[dict[str, Any]]) -> str:
    """Seconds over the number of agents, as an SVG."""
    curves = {
        "until all have joined": [each["joined_s"] for each in found],
        "until a request has reached the last, silent agents": [
            each["silent"]["median_ms"] / 1e3 for each in found
        ],
        "the same, talking agents": [each["talking"]["median_ms"] / 1e3 for each in found],
    }
    thousands = [each["agents"] / 1000 for each in found]
    return lines(
        {name: list(zip(thousands, values, strict=True)) for name, values in curves.items()},
        title="A lead and its agents, all on one machine of two cores",
        x="thousand agents",
        y="seconds",
        top=5.0 * math.ceil(max(map(max, curves.values())) / 5),  # for whole numbers at the axis
    )


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{found['agents']} agents, joined in {found['joined_s']} s; load {found['load']}"]
    for kind in ("silent", "talking"):
        one = found[kind]
        lines.append(
            f"{kind:8} median {one['median_ms']:7.1f} ms   max {one['max_ms']:7.1f} ms   of {one['rounds']}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[1000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--figure", type=Path, help="an SVG of the sizes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--crowd", nargs=3, metavar=("RUN", "FIRST", "NUMBER"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.crowd:
        root, first, number = options.crowd
        crowd = Crowd(int(first), int(number))
        asyncio.run(crowd.live(read_lead_address(RunPaths(Path(root)))))
        return 0
    found = []
    for agents in options.agents:
        with (
            tempfile.TemporaryDirectory(prefix="vs-") as name,
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),  # the journal talks, too
        ):
            found.append(asyncio.run(measure(agents, options.rounds, options.processes, Path(name))))
        print(json.dumps(found[-1]) if options.json else table(found[-1]), flush=True)
    if options.figure:
        options.figure.write_text(figure(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
