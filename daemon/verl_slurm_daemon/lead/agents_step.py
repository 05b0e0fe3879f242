"""One step of the job, with the agents of one restart: what the lead knows of it, and how it ends."""

import asyncio
import contextlib
import os
import re
import signal
import stat
from collections.abc import Collection, Sequence

from verl_slurm.base.errors import NOT_SET_UP
from verl_slurm.journal.events import Stacks
from verl_slurm.slurm.commands import NAME
from verl_slurm.wire.messages import AgentReady, DumpStacks, Shutdown, StacksWritten
from verl_slurm_daemon.allocation.contract import StepPlacement
from verl_slurm_daemon.decide import inputs
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.link.channel import AgentLink
from verl_slurm_daemon.link.rank_store import RankStore

GOODBYE_S = 5.0
"""From `Shutdown` to the end of the step: an agent needs under 0.3 s; then it is killed."""

_SRUN_ENDS_S = 0.5
"""From the end of the last agent to that of srun: some milliseconds, if no node is lost."""
_STACKS_S = 5.0
"""Limit for all agents to report that stacks are written; each takes a second."""
_STEP_ENDS_S = 2.0
"""From the end of the first agent to that of srun, if srun is what ends."""
# But for what srun says of its shepherd, which `keep_step` has ended.
_OF_SLURM = re.compile(r"(?:\[[^]]*\] )?(?:slurmstepd|srun)(?:-\S+)?: error: (?!write\(shepherd)(.{1,300})")
_OF_RESTART = re.compile(r" verl-slurm\[\d+\] (?:!! )?restart ")  # `journal.log_line`
_OF_MEMORY = re.compile(r"exceeded memory limit|oom.kill|out of memory", re.IGNORECASE)
# Of srun, whose other lines follow from it: the running agents are ended because of it.
_OF_LAUNCH = re.compile(rf"Task launch for .{{1,60}} failed on node ({NAME.pattern}): ")
_OF_EXIT = re.compile(rf"({NAME.pattern}|\S+\[\S+\]): tasks? \S+: Exited with exit code")
_MOST_BYTES, _MOST_WORDS = 1 << 16, 3


class Step:
    """The agents of one restart, and their processes.

    Args:
        nodes: of the ranks; at least so many, while it stands by.
        places: which nodes the agents are on; None: there is no choice.

    Attributes:
        processes: srun's, or the agents themselves; all have ended: the step is over.
        links, ready: of the agents, by node.
        train_nodes: those of the ranks, in their order, once it is settled.
        training: a rank has passed a safe point.
        leaving: it is being ended; set before it is started: it is not to be.
        settings: what the agents were started with.
    """

    def __init__(self, restart: int, nodes: int, places: StepPlacement | None = None) -> None:
        self.restart, self._nodes, self.places = restart, nodes, places or StepPlacement()
        self._wanted = len(self.places.chosen) or nodes
        self._open, self._settled = set[AgentLink](), False
        self._deserted = asyncio.Event()
        self.settings: object = None
        self.train_nodes: list[str] = []
        self.processes: list[asyncio.subprocess.Process] = []
        self.links: dict[str, AgentLink] = {}
        self.ready: dict[str, AgentReady] = {}
        self.listeners: set[asyncio.Task[None]] = set()
        self.store = RankStore()
        self.stacks = asyncio.Queue[StacksWritten]()
        self.all_ready, self.training, self.leaving = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def join(self, link: AgentLink, message: AgentReady) -> None:
        """Takes an agent in, or lets it go if it comes when others have the ranks."""
        self._open.add(link)
        if self._settled:
            link.send(Shutdown())
            return
        self.links[message.node], self.ready[message.node] = link, message
        self._count()

    def _count(self) -> None:
        if len(self.ready) >= self._wanted:
            self.all_ready.set()

    def part(self, link: AgentLink) -> None:
        """Takes note that an agent's link has ended."""
        self._open.discard(link)
        # Without a choice of nodes, Slurm ends the job for a lost one.
        if self.places.chosen and self.all_ready.is_set() and not self._open:
            self._deserted.set()

    def take_up(self, avoid: Collection[str], nodes: int) -> bool:
        """Makes a step that stands by that of the ranks; returns False if it has too few agents for `nodes`."""
        self._nodes = nodes
        if not self.does_without(avoid):
            return False
        self._wanted = nodes
        self._count()
        return True

    def expect(self, places: StepPlacement) -> None:
        """Says where its agents will be, before it is started."""
        self.places = places
        self._nodes = self._wanted = len(places.chosen) or self._nodes

    def does_without(self, avoid: Collection[str]) -> bool:
        """Leaves nodes out; returns whether enough agents are left for the ranks."""
        for node in avoid:
            self._forget(node)
        return not avoid or len(self.ready) >= self._nodes

    def settle(self) -> list[AgentReady]:
        """Returns the agents whose nodes get the ranks, in the order of their ranks. All others are let go."""
        # By SLURM_NODEID and not by arrival: the same nodes get the same ranks at each restart.
        ready = sorted(self.ready.values(), key=lambda one: one.node_id)
        spare = tuple(one.node for one in ready[self._nodes :])
        for node in spare:
            self.links[node].send(Shutdown())
            self._forget(node)
        self._settled, self.places = True, StepPlacement(self.places.chosen, self.places.idle + spare)
        chosen = ready[: self._nodes]
        self.train_nodes = [one.node for one in chosen]
        return chosen

    def _forget(self, node: str) -> None:
        self.links.pop(node, None)
        self.ready.pop(node, None)

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

    async def write_stacks(self, journal: Journal) -> None:
        """Makes all ranks write down where they are, because of a hang, and waits a few seconds for it."""
        links = list(self.links.values())
        for link in links:
            link.send(DumpStacks())
        with contextlib.suppress(TimeoutError):
            # Bounded: a dead node does not answer.
            async with asyncio.timeout(_STACKS_S):
                for _ in links:  # more may join in between
                    one = await self.stacks.get()
                    journal.write(Stacks(one.node, one.log))

    async def end(self) -> bool:
        """Ends it; returns whether it ended by itself."""
        self.shut_down()
        return await end_step(self.processes, GOODBYE_S)

    async def wait(self) -> int:
        """Waits for its end; returns the exit code that says most."""
        srun = asyncio.create_task(self._kill_deserted())
        try:
            return max([await process.wait() for process in self.processes], key=abs)
        finally:
            srun.cancel()

    async def _kill_deserted(self) -> None:
        """Ends a step whose agents have all left but those of lost nodes."""
        # srun would wait until Slurm finds these lost, too.
        await self._deserted.wait()
        await asyncio.sleep(_SRUN_ENDS_S)
        for process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def why_lost(self, node: str, lost: Collection[str]) -> inputs.NodeFailed | inputs.CauseKnown:
        """Returns what it means that a node's agent is gone without a word. `lost`: nodes lost before."""
        # srun ends the running agents if a node cannot be reached (24.11). Then nothing speaks against the agent's own.
        fell, lines = await self._fell(), await self._lines_of_slurm()
        if not self.all_ready.is_set() and any(map(_OF_LAUNCH.search, lines)):
            fell = fell or self.missing  # srun may take half a minute to end after it
        words = "; ".join(lines[-_MOST_WORDS:])
        if _OF_MEMORY.search(words):
            # Every node of this kind would do the same, so none is avoided.
            ways = "give it more memory (slurm.mem_mb_per_node), or let the ranks need less"
            return inputs.NodeFailed(node, f"its agent was killed for lack of memory: {words}; {ways}")
        if not fell:
            detail = f"the agent is gone: {words}" if words else "the agent is gone without a word"
            return inputs.NodeFailed(node, detail, lost=True)
        absent = [name for name in self.places.chosen if name not in self.ready]
        # It was tried for want of a spare one. With --no-kill, Slurm leaves the end of such a job to us.
        if set(absent) & set(lost):
            return inputs.CauseKnown("failed", f"no spare node is left for {', '.join(absent)}: {fell}", None)
        return why_absent(fell, lines, self.ready, absent)

    async def why_absent(self, how: str) -> inputs.NodeFailed:
        """Returns what it means that agents have not come. `how`: they have not, for people."""
        absent = [name for name in self.places.chosen if name not in self.ready]
        return why_absent(how, await self._lines_of_slurm(), self.ready, absent)

    @property
    def missing(self) -> str:
        """Returns how many agents have not come, for people."""
        return f"{self._wanted - len(self.ready)} of {self._wanted} agents had not come"

    async def _lines_of_slurm(self) -> list[str]:
        # If the agents were all that kept srun, its words are there when it has ended.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SRUN_ENDS_S):
                await asyncio.gather(*(process.wait() for process in self.processes))
        return await slurms_lines()

    async def _fell(self) -> str:
        """Returns how the step ended, if it did not come up as a whole."""
        if self.all_ready.is_set() or not self.processes:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STEP_ENDS_S):
                await self.wait()
        return f"the step ended while {self.missing}" if self.is_over else ""

    async def last_words(self) -> None:
        """Reads what the agents have sent before their end: it is still in the sockets. Then closes the links."""
        if self.listeners:
            await asyncio.wait(self.listeners, timeout=GOODBYE_S)
        for link in self.links.values():
            link.close()
        # Calls that still wait are answered.
        self.store.close()


def why_absent(
    how: str, lines: Sequence[str], came: Collection[str], absent: Sequence[str] = ()
) -> inputs.NodeFailed:
    """Returns what it means that processes of a step have not come: the environment's fault, or their own. Pure.

    Args:
        how: they have not, for people.
        lines: Slurm's (`slurms_lines`).
        came: the nodes of those that have.
        absent: the nodes of the others, where a step has chosen its nodes.
    """
    launch = [match for line in lines if (match := _OF_LAUNCH.search(line))]
    exits = [match for line in lines if (match := _OF_EXIT.search(line)) and match[1] not in came]
    words = "; ".join([match.string for match in launch[:_MOST_WORDS]] or lines[-_MOST_WORDS:])
    detail = f"{how}: {words}" if words else how
    # All are one program: where one has come, or Slurm has started none, the fault is not the program's. Else it may
    # be, until ranks have trained.
    if exits and not launch and not came:
        return inputs.NodeFailed("", f"{NOT_SET_UP}: {detail}")
    named = [match[1] for match in (*launch, *exits) if NAME.fullmatch(match[1])]
    node = next(iter((*named, *(absent if came else ()))), "")
    return inputs.NodeFailed(node, detail, lost=True, environment=True)


async def slurms_lines() -> list[str]:
    """Returns what slurmstepd and srun have written to the job's log since the restart, as far as it can be read."""
    # The log may lie on storage that does not answer.
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(_STEP_ENDS_S):
            return await asyncio.to_thread(_read_slurms_lines)
    return []


def _read_slurms_lines() -> list[str]:
    """Returns Slurm's lines in the job's log, which is our stderr; none if that is no file. Raises OSError."""
    info = os.fstat(2)
    if not stat.S_ISREG(info.st_mode):
        return []
    with open("/proc/self/fd/2", "rb") as log:
        log.seek(max(0, info.st_size - _MOST_BYTES))
        lines = log.read(_MOST_BYTES).decode("utf-8", "replace").splitlines()
    begun = max((number for number, line in enumerate(lines) if _OF_RESTART.search(line)), default=-1)
    return [match[1] for line in lines[begun + 1 :] if (match := _OF_SLURM.match(line))]


async def end_step(step: Sequence[asyncio.subprocess.Process], each_s: float) -> bool:
    """Waits `each_s` for a step's own end, then for TERM's and KILL's; returns whether it ended by itself."""
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
