"""The channel between lead and agents on a network that cuts, joins, repeats and holds back, and among strangers."""

import asyncio
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from verl_slurm_daemon.link import channel
from verl_slurm_daemon.link.channel import AgentLink, LeadLink, connect, serve

from tests.fakes.faulty_proxy import Chaos, chaos_proxy
from tests.hostile.lead_port import ATTEMPT, TOKEN, lead_port
from tests.hostile.netlab import ADDRESS, Netlab, netlab
from verl_slurm.base.errors import WireError
from verl_slurm.wire import connection_limits
from verl_slurm.wire.framing import HELLO, MAX_FRAME
from verl_slurm.wire.messages import FromAgent, NodeExited, SaveRequest, SignalSeen, ToAgent

pytestmark = pytest.mark.slow

GREETING = 64
"""Bytes that an agent sends before its first frame."""


_open: list[asyncio.Server] = []
_joined: list[LeadLink] = []


class Lead:
    """A lead's port in this loop. It answers each signal with a request of that number."""

    def __init__(self) -> None:
        self.heard: list[FromAgent] = []
        self.broken: list[str] = []
        self.refused: list[str] = []
        self.links: list[AgentLink] = []
        self.ended: asyncio.Queue[None] = asyncio.Queue()
        self.said: asyncio.Queue[FromAgent] = asyncio.Queue()
        self.port = 0

    async def open(self, host: str = "127.0.0.1", links: int = 8) -> "Lead":
        self.server, self.port = await serve(
            host, TOKEN, ATTEMPT, links, self._on_link, lambda why, _: self.refused.append(why)
        )
        _open.append(self.server)
        return self

    async def _on_link(self, link: AgentLink) -> None:
        def deliver(message: FromAgent) -> None:
            self.heard.append(message)
            self.said.put_nowait(message)
            if isinstance(message, SignalSeen):
                link.send(SaveRequest(request_id=message.signal, stop=False, seconds_left=0.0))

        self.links.append(link)
        try:
            await link.messages(deliver)
        except (WireError, OSError) as error:
            self.broken.append(str(error))
        finally:
            self.ended.put_nowait(None)

    @property
    def signals(self) -> list[int]:
        return [message.signal for message in self.heard if isinstance(message, SignalSeen)]


class Agent:
    """An agent's end of a link, in this loop."""

    def __init__(self, link: LeadLink) -> None:
        self._link = link
        self.got: list[int] = []
        self._come: asyncio.Queue[int] = asyncio.Queue()
        self._listening = asyncio.create_task(link.messages(self._hear))

    @classmethod
    async def join(cls, port: int, host: str = "127.0.0.1") -> "Agent":
        link = await connect(host, port, TOKEN, ATTEMPT)
        _joined.append(link)
        return cls(link)

    def _hear(self, message: ToAgent) -> None:
        assert isinstance(message, SaveRequest)
        self.got.append(message.request_id)
        self._come.put_nowait(message.request_id)

    def tell(self, *numbers: int) -> None:
        for number in numbers:
            self._link.send(SignalSeen(node="n1", signal=number))

    def send(self, message: FromAgent) -> None:
        self._link.send(message)

    async def answers(self, number: int) -> list[int]:
        return [await self._come.get() for _ in range(number)]

    async def close(self) -> None:
        await self._link.close()
        await self._listening


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        try:
            async with asyncio.timeout(60):
                await story()
        finally:
            while _open:
                _open.pop().close()
            while _joined:
                await _joined.pop().close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:  # they end with their connections; cancelled ones complain
                await asyncio.wait(others, timeout=10)

    asyncio.run(bounded())


NUMBERS = list(range(1, 21))


# ---- N02: bytes that come as they like


@pytest.mark.scenario("N02")
@pytest.mark.parametrize(
    "chaos", [Chaos(chunk=1), Chaos(hold=GREETING + 500), Chaos(chunk=7), Chaos(chunk=1, hold=GREETING + 900)]
)
def test_messages_arrive_once_and_in_order_however_the_bytes_are_cut_or_joined(chaos: Chaos) -> None:
    async def story() -> None:
        lead = await Lead().open()
        chaos.hold, rest = 0, chaos.hold
        async with chaos_proxy(lead.port, chaos):
            agent = await Agent.join(chaos.port)
            chaos.hold = rest
            agent.tell(*NUMBERS)
            assert await agent.answers(len(NUMBERS)) == NUMBERS
            assert lead.signals == NUMBERS
            await agent.close()
        assert lead.broken == []

    play(story)


def _sent() -> int:
    """Bytes that an agent sends which joins and tells two signals."""
    sizes: list[int] = []

    async def story() -> None:
        lead = await Lead().open()
        async with chaos_proxy(lead.port, Chaos()) as chaos:
            agent = await Agent.join(chaos.port)
            agent.tell(1, 2)
            await agent.answers(2)
            sizes.append(len(chaos.up))
            await agent.close()

    play(story)
    return sizes[0]


@pytest.mark.scenario("N02")
def test_a_connection_that_is_reset_at_any_byte_executes_nothing_by_halves_or_twice() -> None:
    """And the next one, with a session of its own, says all there is to say."""
    whole = _sent()
    frame = (whole - GREETING) // 2

    async def story() -> None:
        for cut in range(1, whole):
            lead = await Lead().open()
            async with chaos_proxy(lead.port, Chaos(cut_after=cut)) as chaos:
                if cut > GREETING:
                    agent = await Agent.join(chaos.port)
                    agent.tell(1, 2)
                    await lead.ended.get()
                else:
                    with pytest.raises((OSError, asyncio.IncompleteReadError)):
                        await Agent.join(chaos.port)
                assert lead.signals == [1, 2][: max(0, cut - GREETING) // frame], cut
                lead.heard.clear()
                chaos.cut_after = None
                again = await Agent.join(chaos.port)
                again.tell(3)
                assert await again.answers(1) == [3]
                assert lead.signals == [3]
                await again.close()

    play(story)


@pytest.mark.scenario("N02")
@pytest.mark.parametrize("fault", ["loss", "slow"])
def test_a_bad_line_delays_and_changes_nothing(fault: str) -> None:
    def spoil(lab: Netlab) -> None:
        lab.lose(30) if fault == "loss" else lab.slow("2mbit")

    async def story(lab: Netlab) -> None:
        lead = await Lead().open(ADDRESS["a"])
        agent = await _joined_from_b(lab, lead)
        spoil(lab)
        if fault == "slow":  # more than the line's buffers hold
            for _ in range(3):
                lead.links[0].send(SaveRequest(request_id=0, stop=False, seconds_left=0.0))
                agent.send(NodeExited(node="n1", exit_code=1, detail="x" * (MAX_FRAME - 200)))
            assert await agent.answers(3) == [0, 0, 0]
        for number in NUMBERS:  # a packet each
            agent.tell(number)
            assert await agent.answers(1) == [number]
        assert lead.signals == NUMBERS
        if fault == "loss":
            assert lab.lost() > 0
        lab.heal()
        await agent.close()
        assert lead.broken == []

    with netlab() as lab, lab.inside("a"):
        play(lambda: story(lab))


async def _joined_from_b(lab: Netlab, lead: Lead) -> Agent:
    """Its socket is made on the other side of the cable."""
    with lab.inside("b"):
        connection = socket.create_connection((ADDRESS["a"], lead.port), timeout=1)
    connection.setblocking(False)
    original = asyncio.open_connection

    async def there(host: str, port: int) -> Any:
        return await original(sock=connection)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "open_connection", there)
        return await Agent.join(lead.port, ADDRESS["a"])


@pytest.mark.scenario("N02")
def test_a_kernel_that_ends_the_connection_in_mid_frame_is_survived() -> None:
    async def story(lab: Netlab) -> None:
        lead = await Lead().open(ADDRESS["a"])
        agent = await _joined_from_b(lab, lead)
        agent.tell(1)
        assert await agent.answers(1) == [1]
        lab.slow("64kbit")
        lab.cut()  # nothing of the frame arrives, or only a part
        agent.send(NodeExited(node="n1", exit_code=1, detail="x" * (MAX_FRAME - 200)))
        lab.wait_for_losses()
        lab.reset(lead.port)
        lab.heal()
        agent.tell(2)  # into a link that is gone
        await agent._listening
        assert lead.heard == [SignalSeen(node="n1", signal=1)]
        again = await _joined_from_b(lab, lead)
        again.tell(3)
        assert await again.answers(1) == [3]
        assert lead.signals == [1, 3]
        await again.close()

    with netlab() as lab, lab.inside("a"):
        play(lambda: story(lab))


# ---- N03: frames that were there before


@pytest.mark.scenario("N03")
@pytest.mark.parametrize("what", ["twice", "replayed", "reordered", "of another session"])
def test_a_frame_that_comes_again_or_too_early_ends_the_link_and_is_counted(what: str) -> None:
    async def story() -> None:
        lead = await Lead().open()
        async with chaos_proxy(lead.port, Chaos()) as recording:
            agent = await Agent.join(recording.port)
            agent.tell(1, 2)
            await agent.answers(2)
            recorded = bytes(recording.up[GREETING:])
            await agent.close()
            await lead.ended.get()
        frame = len(recorded) // 2
        lead.heard.clear()
        if what == "of another session":
            agent = await Agent.join(lead.port)
            _inject(agent, recorded)
            await lead.ended.get()
            assert lead.signals == []
            assert "does not carry our MAC" in lead.broken[0]
            return
        async with chaos_proxy(lead.port, Chaos()) as chaos:
            agent = await Agent.join(chaos.port)
            chaos.twice = range(GREETING, GREETING + frame) if what == "twice" else range(0)
            agent.tell(1)
            await agent.answers(1)
            if what == "replayed":
                _inject(agent, bytes(chaos.up[GREETING:]))
            if what == "reordered":
                frames = [agent._link._framer.encode(SignalSeen(node="n1", signal=n)) for n in (2, 3)]
                _inject(agent, frames[1] + frames[0])
            await lead.ended.get()
            assert lead.signals == [1], "executed once"
            assert len(lead.broken) == 1
            assert "out of order" in lead.broken[0]

    play(story)


def _inject(agent: Agent, data: bytes) -> None:
    agent._link._writer.write(data)


@pytest.mark.scenario("N03")
def test_a_recorded_handshake_opens_no_second_session() -> None:
    async def story() -> None:
        lead = await Lead().open()
        async with chaos_proxy(lead.port, Chaos()) as recording:
            agent = await Agent.join(recording.port)
            agent.tell(1)
            await agent.answers(1)
            await agent.close()
            recorded = bytes(recording.up)
        reader, writer = await asyncio.open_connection("127.0.0.1", lead.port)
        assert (await reader.readexactly(40)).startswith(HELLO)
        writer.write(recorded)
        assert await _until_closed(reader) == b""
        writer.close()
        assert (lead.signals, lead.refused) == ([1], ["token"])

    play(story)


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


# ---- N04: strangers


@pytest.fixture
def many_sockets() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    connection_limits.make_room(2500)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2500:
        pytest.skip("NOT RUN: this process may not have 2500 descriptors")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.scenario("N04")
def test_a_thousand_silent_strangers_are_bounded_and_keep_no_agent_out(many_sockets: None) -> None:
    strangers = 1000
    with lead_port(links=8) as port:
        quiet: list[socket.socket] = []
        try:
            for _ in range(strangers):
                quiet.append(socket.create_connection(("127.0.0.1", port.port), timeout=60))
                assert quiet[-1].recv(40).startswith(HELLO)
            most = connection_limits.ROW + 8
            # On a machine that stood still for 5 s they are sent away as silent.
            while (seen := port.look()) and sum(seen["refused"].values()) < strangers - most:
                pass
            assert set(seen["refused"]) <= {"crowded", "silent"}
            assert seen["fds"] < most + 32

            async def agents() -> None:
                joined = await asyncio.gather(
                    *(connect("127.0.0.1", port.port, TOKEN, ATTEMPT) for _ in range(8))
                )
                for link in joined:
                    link.send(SignalSeen(node="n1", signal=15))
                while port.look()["delivered"] < 8:
                    pass
                for link in joined:
                    await link.close()

            play(agents)
        finally:
            for one in quiet:
                one.close()


@pytest.mark.scenario("N04")
def test_strangers_that_keep_coming_do_not_keep_an_agent_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All places were everybody's once: who came back each time he was sent away had them all, for ever."""
    monkeypatch.setattr(connection_limits, "ROW", 8)

    async def story() -> None:
        lead = await Lead().open(links=2)
        held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", lead.port)
            assert await reader.readexactly(40)  # greeted: it has a place, and somebody else has lost his
            held.append((reader, writer))
            if len(held) % 10 == 0:
                agent = await Agent.join(lead.port)
                agent.tell(15)
                assert await agent.answers(1) == [15]
                await agent.close()
        assert set(lead.refused) == {"crowded"}
        assert len(lead.refused) == 50 - 9, "ten places, and the last agent pushed out one more"
        for _, writer in held:
            writer.close()

    play(story)


@pytest.mark.scenario("N04")
def test_who_does_not_end_the_handshake_in_time_is_sent_away_be_it_byte_by_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert channel._HANDSHAKE_S == 5.0
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.2)

    async def story() -> None:
        lead = await Lead().open()
        silent, saying_nothing = await asyncio.open_connection("127.0.0.1", lead.port)
        reader, dripping = await asyncio.open_connection("127.0.0.1", lead.port)
        assert (await reader.readexactly(40)).startswith(HELLO)
        await silent.readexactly(40)
        monkeypatch.setattr(channel, "_HANDSHAKE_S", 60.0)  # of those that come from here on

        async def drip() -> None:
            while not dripping.is_closing():
                dripping.write(b"x")
                await asyncio.wait([end], timeout=0.02)  # a byte each 0.02 s, of 64

        end = asyncio.create_task(_until_closed(reader))
        drops = asyncio.create_task(drip())
        assert await end == b""
        dripping.close()
        await drops
        assert await _until_closed(silent) == b""
        saying_nothing.close()
        assert lead.refused == ["silent", "silent"]
        agent = await Agent.join(lead.port)
        agent.tell(15)
        assert await agent.answers(1) == [15]
        await agent.close()

    play(story)


@pytest.mark.scenario("N04")
def test_a_proven_peer_beyond_the_agents_places_is_sent_away_and_the_others_stay() -> None:
    async def story() -> None:
        lead = await Lead().open(links=2)
        first = [await Agent.join(lead.port) for _ in range(2)]
        third = await Agent.join(lead.port)
        await third._listening
        assert lead.refused == ["full"]
        for agent in first:
            agent.tell(15)
            assert await agent.answers(1) == [15]
            await agent.close()
        await lead.ended.get()
        await lead.ended.get()
        late = await Agent.join(lead.port)  # a place is free again
        late.tell(15)
        assert await late.answers(1) == [15]
        await late.close()

    play(story)


def test_agents_that_come_at_once_find_room_in_the_kernels_queue() -> None:
    """While the lead is busy: nobody is accepted, and nobody has to ask again."""
    if (most := int(Path("/proc/sys/net/core/somaxconn").read_text())) < 300:
        pytest.skip(f"NOT RUN: the kernel's own limit is {most} (net.core.somaxconn)")

    async def story() -> None:
        lead = await Lead().open(links=300)
        began = time.monotonic()
        # Blocking, in this very thread: the port's loop does not run meanwhile.
        come = [socket.create_connection(("127.0.0.1", lead.port), timeout=30) for _ in range(300)]
        assert time.monotonic() - began < 25
        for one in come:
            one.close()

    play(story)
