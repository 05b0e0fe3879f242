"""One step of the job, with the agents of one restart: what the lead knows of it, and how it ends."""

import asyncio
import contextlib
import signal
from collections.abc import Sequence

from verl_slurm.wire.messages import AgentReady, Shutdown
from verl_slurm_daemon.link.channel import AgentLink
from verl_slurm_daemon.link.rank_store import RankStore

__all__ = ["GOODBYE_S", "Step", "end_step"]

GOODBYE_S = 5.0
"""From `Shutdown` to the end of the step: an agent needs under 0.3 s; then it is killed."""

_STEP_ENDS_S = 2.0
"""From the end of the first agent to that of srun, if srun is what ends."""


class Step:
    """The agents of one restart, and their processes.

    Args:
        generation: the restart.
        nodes: agents that it has when it is complete.

    Attributes:
        processes: srun's, or the agents themselves; all have ended: the step is over.
        links, ready: of the agents, by node.
        listeners: tasks that read the links.
        store: the keys by which the ranks find each other.
        all_ready: every agent is.
        training: a rank has passed a safe point.
        leaving: it is being ended; set before it is started: it is not to be.
        settings: what the agents were started with.
    """

    def __init__(self, generation: int, nodes: int) -> None:
        self.generation, self._nodes = generation, nodes
        self.settings: object = None
        self.processes: list[asyncio.subprocess.Process] = []
        self.links: dict[str, AgentLink] = {}
        self.ready: dict[str, AgentReady] = {}
        self.listeners: set[asyncio.Task[None]] = set()
        self.store = RankStore()
        self.all_ready, self.training, self.leaving = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def join(self, link: AgentLink, message: AgentReady) -> None:
        """Takes an agent in."""
        self.links[message.node], self.ready[message.node] = link, message
        if len(self.ready) == self._nodes:
            self.all_ready.set()

    @property
    def stands(self) -> bool:
        """Returns whether it was started, and nothing ends it."""
        return bool(self.processes) and not self.leaving.is_set() and not self.is_over

    @property
    def is_over(self) -> bool:
        """Returns whether it had processes, and all have ended."""
        return bool(self.processes) and all(one.returncode is not None for one in self.processes)

    def shut_down(self) -> None:
        """Tells the agents to end what runs on their nodes."""
        self.leaving.set()
        for link in self.links.values():
            link.send(Shutdown())

    async def end(self) -> bool:
        """Ends it; returns whether it ended by itself."""
        self.shut_down()
        return await end_step(self.processes, GOODBYE_S)

    async def wait(self) -> int:
        """Waits for its end; returns the exit code that says most."""
        return max([await process.wait() for process in self.processes], key=abs)

    async def fell(self) -> str:
        """Returns why an agent is gone, if its step did not come up as a whole: srun ends the running agents if a node
        cannot be reached (24.11). Then nothing speaks against the agent's own node.
        """
        if self.all_ready.is_set() or not self.processes:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STEP_ENDS_S):
                await self.wait()
        absent = self._nodes - len(self.ready)
        return f"the step ended while {absent} of {self._nodes} agents had not come" if self.is_over else ""

    async def last_words(self) -> None:
        """Reads what the agents have sent before their end: it is still in the sockets. Then closes the links."""
        if self.listeners:
            await asyncio.wait(self.listeners, timeout=GOODBYE_S)
        for link in self.links.values():
            link.close()
        # Calls that still wait are answered.
        self.store.close()


async def end_step(step: Sequence[asyncio.subprocess.Process], each_s: float) -> bool:
    """Waits for the end of a step that was told to end, then ends it; returns whether it ended by itself.

    Args:
        each_s: seconds for its own end, for TERM and for KILL, each.
    """
    clean = True
    # First the agents' own end, then by srun, which passes TERM on to the step. KILL to srun comes last: without
    # its shepherd (`keep_step`) it leaves agents behind.
    for end in (None, signal.SIGTERM, signal.SIGKILL):
        alive = [process for process in step if process.returncode is None]
        if not alive:
            return clean
        for process in alive:
            if end is not None:
                clean = False
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(end)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(each_s):
                await asyncio.gather(*(process.wait() for process in alive))
    return clean
