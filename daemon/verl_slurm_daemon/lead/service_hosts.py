"""The services of one attempt, as the lead sees them: a step of the job for each, with a host on each of its nodes.

They start before the ranks, outlive the ranks' restarts, and end with the attempt. A service whose host says that it
cannot be started again is started anew with the next restart of the ranks. If the run needs it, the policy hears
`ServiceLost`.
"""

import asyncio
import sys
from contextlib import suppress

from verl_slurm.config.schema import ServiceConfig
from verl_slurm.journal import events as ev
from verl_slurm.wire.messages import ServiceSaid, Shutdown
from verl_slurm_daemon.allocation.launcher import daemon_argv
from verl_slurm_daemon.decide import inputs
from verl_slurm_daemon.lead.agents_step import end_step, slurms_lines, why_absent
from verl_slurm_daemon.lead.attempt import Attempt
from verl_slurm_daemon.link.channel import AgentLink

HOSTS_COME_S = 60.0
"""From srun to the last host's first message, which it sends before it sets anything up."""
_END_S = 3.0
"""For each way of ending a host: it needs 0.1 s. After a preemption the ranks' own end has used up time before."""


class _Service:
    def __init__(self, name: str, config: ServiceConfig) -> None:
        self.name, self.config = name, config
        self.count = config.nodes or 1
        self.task: asyncio.Task[None] | None = None
        self.links: dict[int, AgentLink] = {}
        self.former: set[AgentLink] = set()
        self.begin()

    def begin(self) -> None:
        # Their last words may still be in a socket, and are not about the hosts to come.
        self.former.update(self.links.values())
        self.step: list[asyncio.subprocess.Process] = []
        self.links = {}
        self.addresses: dict[int, str] = {}
        self.ready: set[int] = set()
        self.failed = False

    @property
    def is_settled(self) -> bool:
        """Returns whether the ranks need not wait for it any longer."""
        if self.config.needed:
            return len(self.ready) == self.count
        return self.failed or len(self.addresses) == self.count


class Services:
    """The services of one attempt; see the module."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt, self._journal = attempt, attempt.journal
        self._services = {name: _Service(name, one) for name, one in attempt.config.services.items()}
        self._changed, self._closing = asyncio.Event(), False

    @property
    def num_hosts(self) -> int:
        return sum(service.count for service in self._services.values())

    def addresses(self) -> dict[str, str]:
        """Returns where the services are, by name: `host:port`, with commas between several nodes' in their order."""
        there = [one for one in self._services.values() if len(one.addresses) == one.count and not one.failed]
        return {one.name: ",".join(one.addresses[index] for index in range(one.count)) for one in there}

    async def start(self, leaving: asyncio.Event) -> None:
        """Starts those that do not run; returns when all that are needed are ready, or `leaving` is set."""
        for service in self._services.values():
            if service.task is not None and service.failed:
                await self._end(service)
            if service.task is None or service.task.done():
                service.begin()
                service.task = asyncio.create_task(self._run(service))
        wanted = asyncio.create_task(leaving.wait())
        # A needed one that cannot be started is posted as `ServiceLost`, whose consequence sets `leaving`.
        while not leaving.is_set() and not all(one.is_settled for one in self._services.values()):
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait([wanted, changed], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        wanted.cancel()

    async def _run(self, service: _Service) -> None:
        try:
            given = self._attempt.paths, self._attempt.number, "--name", service.name
            argv = daemon_argv(sys.executable, "service", *given)
            service.step = await self._attempt.allocation.start_step(argv, service.name)
        except OSError as error:  # no processes left
            self._fail(service, "", f"its host was not started: {error}")
            return
        ends = [asyncio.create_task(process.wait()) for process in service.step]
        await asyncio.wait(ends, timeout=HOSTS_COME_S)
        if len(service.addresses) < service.count and not all(end.done() for end in ends):
            missing = service.count - len(service.addresses)
            how = f"{missing} of {service.count} hosts did not come in {HOSTS_COME_S:g} s"
            await self._fail_absent(service, how)
        codes = await asyncio.gather(*ends)
        await self._fail_absent(service, f"its host ended with {max(codes, key=abs)}")

    async def _fail_absent(self, service: _Service, how: str) -> None:
        absent = len(service.addresses) < service.count and self._attempt.allocation.cluster == "slurm"
        if not absent or service.failed:
            self._fail(service, "", how)
            return
        why = why_absent(how, await slurms_lines(), tuple(service.addresses.values()))
        self._fail(service, why.node, why.detail, environment=why.environment)

    def hear(self, message: ServiceSaid, link: AgentLink) -> None:
        """Takes a message of a host."""
        service = self._services.get(message.service)
        if service is None or message.index >= service.count or service.failed:
            link.send(Shutdown())
            return
        if link in service.former:
            return
        known = service.links.setdefault(message.index, link)
        if known is not link:  # a second host for one place
            link.send(Shutdown())
            return
        if self._closing:
            link.send(Shutdown())
        name, node = message.service, message.node
        match message.what:
            case "started":
                service.addresses[message.index] = message.address
                self._journal.write(ev.ServiceStarted(name, node, message.address))
            case "ready":
                service.ready.add(message.index)
                self._journal.write(ev.ServiceReady(name, node, message.address, message.seconds))
            case "ended":
                service.ready.discard(message.index)
                budget = service.config.restarts
                self._journal.write(ev.ServiceEnded(name, node, message.detail, message.restarts, budget))
            case "failed":
                self._fail(service, node, message.detail)
        self._changed.set()

    def gone(self, link: AgentLink) -> bool:
        """Takes the end of a link; returns whether it was a host's."""
        for service in self._services.values():
            if link in service.links.values():
                self._fail(service, "", "its host is gone without a word")
                return True
        return False

    def _fail(self, service: _Service, node: str, detail: str, *, environment: bool = False) -> None:
        if service.failed or self._closing:
            return
        service.failed = True
        self._journal.write(ev.ServiceFailed(service.name, node, detail, service.config.needed))
        # The hosts on its other nodes: the ranks would find it in part.
        for link in service.links.values():
            link.send(Shutdown())
        if service.config.needed:
            where = f" on {node}" if node else ""
            lost = inputs.ServiceLost(f"service {service.name}{where}: {detail}", environment)
            self._attempt.post(lost)
        self._changed.set()

    async def _end(self, service: _Service) -> bool:
        """Ends a service; returns whether it ended by itself."""
        for link in service.links.values():
            link.send(Shutdown())
        clean = await end_step(service.step, _END_S)
        if service.task is not None:
            service.task.cancel()
            with suppress(asyncio.CancelledError):
                await service.task
        return clean

    async def close(self) -> bool:
        """Ends all of them; returns whether each ended by itself. Takes under a second unless a node hangs."""
        self._closing = True
        return all(await asyncio.gather(*(self._end(service) for service in self._services.values())))
