"""Another user, or a port that is left, in the place of a service: nothing that ranks send reaches them."""

import asyncio
import contextlib
import json
import os
import pwd
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from verl_slurm_daemon.agent.service import connect_checked
from verl_slurm_daemon.link import relay
from verl_slurm_daemon.link.relay import Streams, open_far_end, open_near_end

from tests.daemon.test_services import HostStory
from tests.hostile.another_user import NOBODY, PYTHON_OF_NOBODY, needs_another_user
from tests.processes import free_port
from verl_slurm.base.errors import PermissionRefused
from verl_slurm.wire.tcp_table import listener_of

# Listens on the port that comes on standard input, answers as a web server, and prints what it was sent.
_EVE = """
import socket, sys
place = sys.argv[1], int(sys.stdin.readline())
server = socket.create_server(place, family=socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
print("listens", flush=True)
while True:
    peer, _ = server.accept()
    peer.settimeout(5)
    try:
        data = peer.recv(4096)
        peer.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 3\\r\\n\\r\\n1.0")
    except OSError:
        data = b""
    peer.close()
    print(data.hex() or "nothing", flush=True)
"""
KEY = b"k" * 32


class Eve:
    """A process of another user, who listens where she is told to."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        argv = [*PYTHON_OF_NOBODY, "-c", _EVE, address]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )

    def listen(self, port: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{port}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "listens\n"

    def end(self) -> list[str]:
        """Ends her; returns what she was sent, in hexadecimal, by connection."""
        self._process.kill()
        told, _ = self._process.communicate()
        return [line for line in told.split() if line != "nothing"]


# Says where it would listen, waits until somebody else listens there, and comes too late.
_SLOW = """
import http.server, os, sys, time
place = (os.environ["VERL_SLURM_HOST"], int(os.environ["VERL_SLURM_PORT"]))
with open(os.environ["PORT_FIFO"], "w") as file: file.write(f"{place[1]}\\n")
with open(os.environ["TAKEN_FIFO"]) as file: file.read()
time.sleep(1)  # the host's probes meanwhile are what this is about
http.server.HTTPServer(place, http.server.SimpleHTTPRequestHandler).serve_forever()
"""


@pytest.mark.slow
@needs_another_user
def test_a_service_whose_port_another_user_takes_first_is_never_ready_and_says_who(tmp_path: Path) -> None:
    fifos = {name: str(tmp_path / name) for name in ("PORT_FIFO", "TAKEN_FIFO")}
    for path in fifos.values():
        os.mkfifo(path)
    story = HostStory(tmp_path, probe="/", restarts=0, env=fifos)
    (tmp_path / "judge.py").write_text(_SLOW)
    eve = Eve()

    def take() -> None:
        with open(fifos["PORT_FIFO"]) as file:
            eve.listen(int(file.read()))
        with open(fifos["TAKEN_FIFO"], "w") as file:
            file.write("x")

    async def both() -> None:
        taking = asyncio.create_task(asyncio.to_thread(take))
        await story.host(lambda said: said.what in ("ready", "failed"))
        await taking

    asyncio.run(both())
    assert [said.what for said in story.said] == ["started", "failed"]
    assert f"uid {NOBODY}" in story.said[1].detail
    assert eve.end() == []


@pytest.mark.slow
@needs_another_user
def test_a_service_is_not_started_at_a_port_that_is_taken_already(tmp_path: Path) -> None:
    port, eve = free_port(), Eve("0.0.0.0")
    eve.listen(port)
    story = HostStory(tmp_path, restarts=0, port=port)
    story.run(lambda said: said.what == "failed")
    assert f"uid {NOBODY}" in story.said[-1].detail
    assert story.starts.read_text() == ""
    assert eve.end() == []


@asynccontextmanager
async def relayed(
    port: int, told: list[str], refused: Callable[[str, str], None] = lambda *_: None
) -> AsyncIterator[tuple[str, int]]:
    """The way of a rank to what listens on `port`."""

    async def reach() -> Streams:
        try:
            return await connect_checked(port)
        except PermissionRefused as error:
            told.append(error.one_line())
            raise

    far, far_port = await open_far_end("127.0.0.1", KEY, 1, 1, reach)
    near, address = await open_near_end(f"127.0.0.1:{far_port}", KEY, 1, told.append, refused)
    async with far, near:
        host, _, own = address.partition(":")
        yield host, int(own)


async def sent_and_answered(host: str, port: int, request: bytes = b"Bearer secret") -> bytes | None:
    """Sends a request, and reads to the end of the answer; None: the connection broke."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return None
    finally:
        writer.transport.abort()


@needs_another_user
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])
def test_ranks_send_nothing_to_another_user_who_takes_the_port_between_two_probes(address: str) -> None:
    async def story() -> None:
        told: list[str] = []
        server = await asyncio.start_server(_echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with relayed(port, told) as way:
            assert await sent_and_answered(*way) == b"Bearer secret"
            server.close()
            eve = Eve(address)
            eve.listen(port)
            assert await sent_and_answered(*way) is None
        assert eve.end() == []
        assert [f"uid {NOBODY}" in line for line in told] == [True]

    asyncio.run(story())


@needs_another_user
def test_another_user_at_another_address_of_the_services_port_does_not_end_it() -> None:
    async def story() -> None:
        told: list[str] = []
        async with await asyncio.start_server(_echo, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            eve = Eve("127.0.0.2")
            eve.listen(port)
            assert listener_of(port).uid == NOBODY
            async with relayed(port, told) as way:
                assert await sent_and_answered(*way) == b"Bearer secret"
        assert (eve.end(), told) == ([], [])

    asyncio.run(story())


@needs_another_user
def test_ranks_send_nothing_to_another_user_at_the_port_of_a_host_that_is_gone() -> None:
    async def story() -> None:
        told: list[str] = []
        port, eve = free_port(), Eve()
        eve.listen(port)
        near, address = await open_near_end(f"127.0.0.1:{port}", KEY, 1, told.append, lambda *_: None)
        async with near:
            host, _, own = address.partition(":")
            assert await sent_and_answered(host, int(own)) is None
        assert not any(b"secret" in bytes.fromhex(line) for line in eve.end())

    asyncio.run(story())


# Holds silent connections to a port, from one of its own addresses, and tells when all of them have been reset.
_CROWD = """
import socket, sys
host, port, family = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
held = []
for _ in range(20):
    line = socket.socket(family)
    if family == socket.AF_INET:
        line.bind((host, 0))
    line.connect(("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1", port))
    held.append(line)
print("holds", flush=True)
for line in held:
    line.settimeout(20)
    try:
        assert line.recv(1) == b"", "served"
    except ConnectionResetError:
        pass
print("all reset", flush=True)
"""


@needs_another_user
@pytest.mark.parametrize(
    ("host", "family"),
    [("127.0.0.1", socket.AF_INET), ("127.0.0.2", socket.AF_INET), ("::", socket.AF_INET6)],
)
def test_silent_connections_of_another_user_take_no_place_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch, host: str, family: int
) -> None:
    monkeypatch.setattr(relay, "MOST_CONNECTIONS", 4)

    async def story() -> None:
        refused: list[tuple[str, str]] = []
        async with (
            await asyncio.start_server(_echo, "127.0.0.1", 0) as server,
            relayed(server.sockets[0].getsockname()[1], [], lambda *what: refused.append(what)) as way,
        ):
            argv = [*PYTHON_OF_NOBODY, "-c", _CROWD, host, str(way[1]), str(int(family))]
            crowd = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, cwd="/")
            assert crowd.stdout is not None
            assert await crowd.stdout.readline() == b"holds\n"
            async with asyncio.timeout(20):
                answers = await asyncio.gather(*(sent_and_answered(*way) for _ in range(8)))
                assert answers == [b"Bearer secret"] * 8
            assert await crowd.stdout.read() == b"all reset\n"
            assert await crowd.wait() == 0
        assert refused == [("user", f"uid {NOBODY} ({pwd.getpwuid(NOBODY).pw_name})")] * 20

    asyncio.run(story())


def test_ranks_that_have_to_wait_for_their_service_are_said_once_and_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "MOST_CONNECTIONS", 1)

    async def story() -> None:
        told: list[str] = []
        async with (
            await asyncio.start_server(_echo, "127.0.0.1", 0) as server,
            relayed(server.sockets[0].getsockname()[1], told) as way,
        ):
            answers = await asyncio.gather(*(sent_and_answered(*way) for _ in range(64)))
        assert ["are in use; further ones wait" in line for line in told] == [True]
        # The kernel resets some of those that find the port's queue full.
        assert answers == [b"Bearer secret"] * 64

    asyncio.run(story())


def test_an_answer_that_is_cut_does_not_look_whole_to_the_rank() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps([1.0, 2.0]).encode()[:4])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        # Unread bytes: the kernel sends a reset, as it does for a process that is killed in the middle.
        writer.transport.abort()

    async def story() -> None:
        async with (
            await asyncio.start_server(cut, "127.0.0.1", 0, limit=16) as server,
            relayed(server.sockets[0].getsockname()[1], []) as way,
        ):
            assert await sent_and_answered(*way, b"x" * 1_000_000) is None

    asyncio.run(story())


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read())
    writer.close()
