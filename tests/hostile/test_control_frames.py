"""Malformed control frames at a real port, from a seed: nothing is accepted, nothing crashes, memory stays flat.

Each comes over a connection of its own, for the first one ends it: most behind a handshake that is right, as from an
agent that was taken over. The port is another process; its memory is looked at.

    make soak TESTS=tests/hostile/test_control_frames.py
    VERL_SLURM_FRAMES=5000 VERL_SLURM_SEED=7 make soak TESTS=tests/hostile/test_control_frames.py
"""

import hashlib
import hmac
import os
import random
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.fuzz.mutation import mutate_bytes, mutate_tree
from tests.fuzz.specimens import from_agent
from tests.hostile.lead_port import ATTEMPT, TOKEN, LeadPort, lead_port
from verl_slurm.wire.framing import HELLO, MAX_FRAME, Framer, proof, session_key
from verl_slurm.wire.messages import FromAgent, Shutdown, SignalSeen

SEED = int(os.environ.get("VERL_SLURM_SEED", "20261121"))
PAYLOADS = from_agent()
DECODER: Any = msgspec.msgpack.Decoder(FromAgent)
WINDOW = 8
"""Connections in each stage of the attack."""


def sealed(
    key: bytes, payload: bytes, *, number: int = 0, direction: bytes = b"A", length: int = -1
) -> bytes:
    """A frame as `framing` describes it, written down a second time: with any of its parts as one likes."""
    mac = hmac.new(key, direction + struct.pack(">Q", number) + payload, hashlib.sha256).digest()
    return struct.pack(">IQ32s", len(payload) if length < 0 else length, number, mac) + payload


def _damaged(draw: random.Random, key: bytes) -> bytes:
    """An honest frame with bytes changed, anywhere."""
    honest = sealed(key, draw.choice(PAYLOADS))
    while (data := mutate_bytes(draw, honest, PAYLOADS)).startswith(honest):
        pass
    return data


def _of_no_vocabulary(draw: random.Random, key: bytes) -> bytes:
    """Right in all but what it says."""
    while True:
        payload = draw.choice(PAYLOADS)
        if draw.random() < 0.7:
            payload = mutate_tree(draw, payload, "msgpack")
        else:
            payload = mutate_bytes(draw, payload, PAYLOADS)
        if len(payload) > MAX_FRAME:
            continue
        try:
            DECODER.decode(payload)
        except Exception:  # noqa: BLE001 - whatever it is, no message
            return sealed(key, payload)


def _out_of_order(draw: random.Random, key: bytes) -> bytes:
    return sealed(key, draw.choice(PAYLOADS), number=draw.choice((1, 2, 255, 2**32, 2**64 - 1)))


def _reflected(draw: random.Random, key: bytes) -> bytes:
    lead: Framer[Any] = Framer(key, b"L", FromAgent)
    return (
        lead.encode(Shutdown()) if draw.random() < 0.5 else sealed(key, draw.choice(PAYLOADS), direction=b"L")
    )


def _of_another_session(draw: random.Random, key: bytes) -> bytes:
    return sealed(draw.randbytes(32), draw.choice(PAYLOADS))


def _of_another_length(draw: random.Random, key: bytes) -> bytes:
    length = draw.choice((0, 1, 10**5, MAX_FRAME, MAX_FRAME + 1, 2**31, 2**32 - 1))
    return sealed(key, draw.choice(PAYLOADS), length=length)


KINDS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _damaged,
    _damaged,
    _of_no_vocabulary,
    _of_no_vocabulary,
    _out_of_order,
    _reflected,
    _of_another_session,
    _of_another_length,
)


class Attack:
    """Sends `number` malformed frames; several connections are under way at once, so that nobody waits."""

    def __init__(self, port: LeadPort, seed: int) -> None:
        self._port, self._draw = port, random.Random(seed)
        self._new: deque[socket.socket] = deque()
        self._sent: deque[socket.socket] = deque()

    def run(self, number: int) -> None:
        for _ in range(number):
            connection = socket.create_connection(("127.0.0.1", self._port.port), timeout=60)
            # No TIME_WAIT: there are fewer ports than frames.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._new.append(connection)
            if len(self._new) > WINDOW:
                self._send(self._new.popleft())
            if len(self._sent) > WINDOW:
                self._end(self._sent.popleft())
        while self._new:
            self._send(self._new.popleft())
        while self._sent:
            self._end(self._sent.popleft())

    def _send(self, connection: socket.socket) -> None:
        draw = self._draw
        nonce_lead, nonce_agent = _hello(connection), draw.randbytes(32)
        answer = nonce_agent + proof(TOKEN, b"agent", ATTEMPT, nonce_lead, nonce_agent)
        if draw.random() < 0.1:  # it does not even know the token
            changed = bytearray(answer)
            changed[draw.randrange(64)] ^= 1 << draw.randrange(8)
            data = bytes(changed[: draw.choice((64, 64, 63, 1, 0))])
        else:
            data = answer + draw.choice(KINDS)(draw, session_key(TOKEN, ATTEMPT, nonce_lead, nonce_agent))
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)  # or the port would wait for the rest of a frame
        except OSError:
            pass  # it was quicker
        self._sent.append(connection)

    def _end(self, connection: socket.socket) -> None:
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass
        connection.close()


def _hello(connection: socket.socket) -> bytes:
    hello = b""
    while len(hello) < 40:
        more = connection.recv(40 - len(hello))
        assert more
        hello += more
    assert hello.startswith(HELLO)
    return hello[len(HELLO) :]


def _one_honest_message(port: LeadPort) -> None:
    with socket.create_connection(("127.0.0.1", port.port), timeout=60) as connection:
        nonce_lead, nonce_agent = _hello(connection), b"n" * 32
        connection.sendall(nonce_agent + proof(TOKEN, b"agent", ATTEMPT, nonce_lead, nonce_agent))
        framer: Framer[Any] = Framer(session_key(TOKEN, ATTEMPT, nonce_lead, nonce_agent), b"A", Shutdown)
        connection.sendall(framer.encode(SignalSeen(node="n1", signal=15)))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def bombard(number: int) -> str:
    """The attack, and what must be so afterwards; returns the figures."""
    with lead_port() as port:
        attack = Attack(port, SEED)
        began = time.perf_counter()
        looks = []
        for tenth in range(10):
            attack.run(number * (tenth + 1) // 10 - number * tenth // 10)
            looks.append(port.look())
        before, after = looks[2], looks[-1]  # by then the heap has its shape
        seconds = time.perf_counter() - began
        assert after["delivered"] == 0, f"VERL_SLURM_SEED={SEED}"
        assert after["all"] + sum(after["refused"].values()) == number
        assert set(after["refused"]) <= {"token", "left"}
        assert after["broken"] > number // 2
        _one_honest_message(port)
        assert port.look()["delivered"] == 1, "it no longer listens"
        memory = " ".join(f"{look['rss'] / 1e6:.1f}" for look in looks)
        figures = (
            f"{number} frames in {seconds:.0f} s, seed {SEED}: {after['broken']} links broken, refused"
            f" {after['refused']}; MB at every tenth: {memory};"
            f" {after['fds'] - before['fds']} more descriptors"
        )
        assert after["links"] == 0, figures
        assert after["fds"] <= before["fds"] + 1, figures
        assert after["rss"] - before["rss"] < 2 << 20, figures
    return figures


def test_malformed_frames_are_all_refused_and_cost_nothing_that_stays() -> None:
    print(bombard(2000))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_million_malformed_frames() -> None:
    print(bombard(int(os.environ.get("VERL_SLURM_FRAMES", "1000000"))))
