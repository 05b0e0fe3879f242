"""Who connects to the control socket or port and is not one of us: refused, counted, told of, and nothing happens.

Another user is a process of uid 65534 (`setpriv`), or a socket of this process that says it is; the lead is the real
`Effects`, the agent's door the real `RankSocket`.
"""

import ast
import asyncio
import contextlib
import hmac
import os
import random
import socket
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from verl_slurm_daemon.agent.rank_socket import REASONS as RANK_REASONS, RankSocket
from verl_slurm_daemon.lead.effects import Effects
from verl_slurm_daemon.link import channel
from verl_slurm_daemon.link.channel import AgentLink, Refusals, connect, serve

from tests.fakes.allocation import first_attempt
from tests.harness import ROOT
from tests.hostile.another_user import NOBODY, PYTHON_OF_NOBODY, needs_another_user
from tests.journals import read_events
from verl_slurm.base.errors import WireError
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.wire.client import SOCKET_NAME
from verl_slurm.wire.connection_limits import REASONS
from verl_slurm.wire.framing import HELLO, NONCE_BYTES, PROOF_BYTES, Framer, proof, session_key
from verl_slurm.wire.lead_file import read_lead_address
from verl_slurm.wire.messages import (
    AgentReady,
    FromAgent,
    FromRank,
    NodeExited,
    RankSaved,
    RankStarted,
    SaveRequest,
    Shutdown,
    ToAgent,
)

TOKEN = b"t" * 32
SEED = 20261121

# The command names in this are no secret: what a stranger would like a lead to do.
WISHES: tuple[FromAgent | ToAgent, ...] = (
    AgentReady(node="n1", node_id=0, address="6.6.6.6", free_port=1),
    NodeExited(node="n1", exit_code=1, detail="die"),
    RankSaved(rank=0, request_id=1, name="step_000099", seconds=1.0, num_bytes=1),
    SaveRequest(request_id=1, stop=True, seconds_left=1.0),
    Shutdown(),
)


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await story()

    asyncio.run(bounded())


class Door:
    """A lead's port: what came in, and who did not."""

    def __init__(self) -> None:
        self.heard: list[FromAgent] = []
        self.told: list[tuple[str, str, int]] = []
        self.refusals = Refusals(REASONS, lambda *what: self.told.append(what))
        self.port = 0

    async def __aenter__(self) -> "Door":
        async def on_link(link: AgentLink) -> None:
            link.send(Shutdown())
            await link.messages(self.heard.append)

        self._server, self.port = await serve("127.0.0.1", TOKEN, 7, 8, on_link, self.refusals.add)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def talk(self, *parts: bytes, first: int = len(HELLO) + NONCE_BYTES) -> tuple[bytes, bytes]:
        """(the lead's hello, what follows until it closes)."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            hello = await reader.readexactly(first)
            for part in parts:
                writer.write(part)
            writer.write_eof()
            return hello, await reader.read()
        except ConnectionResetError:
            return hello, b""
        finally:
            writer.close()


@pytest.mark.scenario("M07")
def test_what_a_stranger_says_to_the_port_is_not_heard_and_counted() -> None:
    encoder = msgspec.msgpack.Encoder()

    async def story() -> None:
        async with Door() as door:
            wishes = b"".join(encoder.encode(wish) for wish in WISHES)
            _, after = await door.talk(os.urandom(NONCE_BYTES + PROOF_BYTES), wishes)
            assert after == b""
            # He knows every word of the protocol, and not the token.
            nonce = bytes(NONCE_BYTES)
            for token in (b"x" * 32, b"", TOKEN[:-1], TOKEN + b"t"):
                key = session_key(token, 7, nonce, nonce)
                frames = b"".join(Framer(key, b"A", ToAgent).encode(wish) for wish in WISHES)  # type: ignore[arg-type]
                _, after = await door.talk(nonce + proof(token, b"agent", 7, nonce, nonce), frames)
                assert after == b""
            assert door.heard == []
            assert {why: count for why, count in door.refusals.counts.items() if count} == {"token": 5}
            assert door.told == [("token", "127.0.0.1", 1)], "the first; the next word is at the tenth"

    play(story)


@pytest.mark.scenario("M07")
def test_what_was_recorded_opens_nothing_a_second_time() -> None:
    """All that an agent said, played again to the same lead and to the next attempt; and all to itself."""

    async def story() -> None:
        recorded = bytearray()
        async with Door() as door:
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            hello = await reader.readexactly(len(HELLO) + NONCE_BYTES)
            nonce_lead, nonce = hello[len(HELLO) :], os.urandom(NONCE_BYTES)
            recorded += nonce + proof(TOKEN, b"agent", 7, nonce_lead, nonce)
            framer: Framer[FromAgent] = Framer(session_key(TOKEN, 7, nonce_lead, nonce), b"A", ToAgent)
            frames = [framer.encode(wish) for wish in WISHES[:3]]  # type: ignore[arg-type]
            writer.write(bytes(recorded) + frames[0])
            their_proof = await reader.readexactly(PROOF_BYTES)
            writer.write(frames[0])  # the same frame again, in its own connection
            rest = await reader.read()
            assert rest, "the word that every link gets"
            writer.close()
            assert door.heard == [WISHES[0]], "a frame counts once"
            for again in (bytes(recorded), bytes(recorded) + b"".join(frames), their_proof + their_proof):
                assert (await door.talk(again))[1] == b""
            # A lead's own proof is none of an agent's: reflected, it opens nothing.
            assert door.refusals.counts["token"] == 3
            assert door.heard == [WISHES[0]]

    play(story)


@pytest.mark.scenario("M07")
def test_an_impostor_in_the_place_of_the_lead_is_not_believed() -> None:
    """He has the port, not the token: an agent does not do what he says."""

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO + bytes(NONCE_BYTES))
        answer = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
        writer.write(answer[NONCE_BYTES:])  # the agent's own proof, reflected
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(WireError, match="does not know the token"):
                await connect("127.0.0.1", port, TOKEN, 7)

    play(story)


@pytest.mark.scenario("M07")
def test_malformed_bytes_are_never_a_link() -> None:
    draw = random.Random(SEED)

    async def story() -> None:
        async with Door() as door:
            for number in range(150):
                size = draw.choice([0, 1, 31, 63, 64, 65, 200, 70_000])
                assert (await door.talk(draw.randbytes(size)))[1] == b"", f"seed {SEED}, input {number}"
            counts = door.refusals.counts
            assert counts["token"] + counts["left"] == 150
            assert [total for _, _, total in door.told] == [1, 10, 100], (
                "ten times as many before the next word"
            )
            assert door.heard == []

    play(story)


@pytest.mark.scenario("M07")
def test_the_silent_hold_no_place_of_an_agent_s_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.2)

    async def story() -> None:
        async with Door() as door:
            silent = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(8)]
            for reader, _ in silent:
                await reader.readexactly(len(HELLO) + NONCE_BYTES)
            monkeypatch.setattr(channel, "_HANDSHAKE_S", 60.0)  # of those that come from here on
            link = await connect("127.0.0.1", door.port, TOKEN, 7)  # they take no place of an agent's
            await link.close()
            for reader, held in silent:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
                held.close()
            assert {why: count for why, count in door.refusals.counts.items() if count} == {"silent": 8}

    play(story)


@pytest.mark.scenario("M07")
def test_the_journal_of_a_lead_tells_of_strangers_and_does_nothing_for_them(tmp_path: Path) -> None:
    paths = RunPaths(private_dir(tmp_path / "run"))
    paths.run_yaml.touch()
    private_dir(paths.control)

    async def story() -> None:
        posted: asyncio.Queue[object] = asyncio.Queue()
        effects = Effects(first_attempt(paths, RunConfig(), post=posted.put_nowait))
        await effects.open()
        try:
            port = read_lead_address(paths).port
            for _ in range(12):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                await reader.readexactly(len(HELLO) + NONCE_BYTES)
                writer.write(os.urandom(NONCE_BYTES + PROOF_BYTES) + b"shutdown")
                assert await reader.read() == b""
                writer.close()
            assert posted.empty(), "no decision was asked for"
            assert effects.attempt.exit is None
            assert effects.restarts.refusals.counts["token"] == 12
        finally:
            await effects.close()

    play(story)
    told = [event for event in read_events(paths) if event["event"] == "stranger"]
    assert [(event["reason"], event["peer"], event["total"]) for event in told] == [
        ("token", "127.0.0.1", 1),
        ("token", "127.0.0.1", 10),
    ]
    assert "t" * 32 not in paths.events.read_text()


# ---- the ranks' socket


STRANGER = """
import os, socket, sys
path, inherited = sys.argv[1], int(sys.argv[2])
found = []
for name in (path, os.path.dirname(path) + "/page"):
    try:
        open(name, "r+b").close() if name.endswith("page") else socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(name)
        found.append("in")
    except PermissionError:
        found.append("refused")
os.fchdir(inherited)  # as if the directory had been left open
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect("./agent.sock")
try:
    line.send(bytes.fromhex(sys.argv[3]))
    found.append("closed" if line.recv(1) == b"" else "answered")
except (ConnectionError, BrokenPipeError):
    found.append("closed")
print(*found)
"""


class Ranks:
    """An agent's door to its ranks 2 and 3."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        monkeypatch.setenv("SLURM_TMPDIR", str(directory))
        self.heard: list[FromRank] = []
        self.told: list[tuple[str, str, int]] = []
        self.refusals = Refusals(RANK_REASONS, lambda *what: self.told.append(what))

    async def __aenter__(self) -> "Ranks":
        self.door = RankSocket(self.heard.append, 8, self.refusals)
        self.door.ranks = range(2, 4)
        self._task = asyncio.create_task(self.door.serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self.door.close()

    async def say(self, *packets: bytes) -> None:
        """One connection; until the agent has heard, or has hung up."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.setblocking(False)
            await loop.sock_connect(line, str(self.door.directory / SOCKET_NAME))
            try:
                for packet in packets:
                    await loop.sock_sendall(line, packet)
                line.shutdown(socket.SHUT_WR)
                assert await loop.sock_recv(line, 1) == b""
            except ConnectionError:
                return


def packed(message: FromRank) -> bytes:
    return msgspec.msgpack.encode(message)


def saved(rank: int) -> RankSaved:
    return RankSaved(rank=rank, request_id=1, name="step_000099", seconds=1.0, num_bytes=1)


@pytest.mark.scenario("M07")
@needs_another_user
def test_another_user_reaches_neither_socket_nor_page_and_is_counted_where_he_does(
    monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    short_dir.chmod(0o711)  # the way there is open to all, as /tmp is

    async def story() -> None:
        async with Ranks(monkeypatch, short_dir) as ranks:
            directory = ranks.door.directory
            assert directory.stat().st_mode & 0o777 == 0o700
            fd = os.open(directory, os.O_RDONLY)
            directory.chmod(0o755)  # what is behind it holds even where somebody has opened the directory
            (directory / SOCKET_NAME).chmod(0o666)
            words = packed(saved(2)).hex()
            stranger = await asyncio.create_subprocess_exec(
                *PYTHON_OF_NOBODY,
                "-c",
                *(STRANGER, str(directory / SOCKET_NAME), str(fd), words),
                stdout=subprocess.PIPE,
                pass_fds=(fd,),
            )
            said, _ = await stranger.communicate()
            os.close(fd)
            # He connects here because the test opened the door; the page still has a mode of its own.
            assert said.decode().split() == ["in", "refused", "closed"]
            assert ranks.heard == []
            assert ranks.refusals.counts == {"user": 2, "left": 0, "crowded": 0, "message": 0, "rank": 0}
            assert ranks.told == [("user", f"pid {stranger.pid} of uid {NOBODY}", 1)]

    play(story)


@pytest.mark.scenario("M07")
@needs_another_user
def test_a_directory_of_mode_0700_keeps_another_user_out(
    monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    short_dir.chmod(0o711)

    async def story() -> None:
        async with Ranks(monkeypatch, short_dir) as ranks:
            path = ranks.door.directory / SOCKET_NAME
            probe = (
                f"import socket; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect({str(path)!r})"
            )
            stranger = await asyncio.create_subprocess_exec(
                *PYTHON_OF_NOBODY,
                "-c",
                probe,
                stderr=subprocess.PIPE,
            )
            _, said = await stranger.communicate()
            assert b"PermissionError" in said
            assert sum(ranks.refusals.counts.values()) == 0

    play(story)


@pytest.mark.scenario("M07")
def test_a_rank_speaks_for_itself_and_for_nobody_else(
    monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    async def story() -> None:
        async with Ranks(monkeypatch, short_dir) as ranks:
            await ranks.say(packed(RankStarted(rank=2, pid=1)), packed(saved(2)))
            await ranks.say(packed(saved(0)))  # a rank of another node
            await ranks.say(packed(RankStarted(rank=3, pid=1)), packed(saved(2)), packed(saved(3)))
            await ranks.say(packed(saved(-1)))
            await ranks.say(b"\xff not a message", packed(saved(2)))
            await ranks.say(msgspec.msgpack.encode({"type": "Shutdown"}))
            # The number of its process is the kernel's, not its own word.
            mine = os.getpid()
            assert ranks.heard == [RankStarted(rank=2, pid=mine), saved(2), RankStarted(rank=3, pid=mine)]
            assert ranks.refusals.counts == {"user": 0, "left": 0, "crowded": 0, "message": 2, "rank": 3}

    play(story)


@pytest.mark.scenario("M07")
def test_every_secret_is_compared_in_constant_time() -> None:
    """No `==` between a token, a MAC or a proof and what somebody sent: `hmac.compare_digest` alone."""
    places = [
        "verl_slurm/wire/framing.py",
        "verl_slurm/wire/http.py",
        "verl_slurm/report/serve.py",
        "daemon/verl_slurm_daemon/link/channel.py",
    ]
    secret = {"token", "mac", "theirs", "proof", "given", "_mac", "secret"}
    for place in places:
        tree = ast.parse((ROOT / place).read_text())
        used = sum(isinstance(n, ast.Attribute) and n.attr == "compare_digest" for n in ast.walk(tree))
        assert used >= 1, place
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                assert not names & secret, f"{place}:{node.lineno}"
    assert hmac.compare_digest(b"a", b"a")
