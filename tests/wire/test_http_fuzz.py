"""Malformed requests to the metrics port, from a seed: nothing is shown, nothing crashes, memory stays flat.

make fuzz HTTP=100000
VERL_SLURM_HTTP_FUZZ=100000 VERL_SLURM_SEED=7 python -m pytest tests/wire/test_http_fuzz.py
"""

import asyncio
import os
import random
from pathlib import Path

import pytest

from verl_slurm.base.errors import WireError
from verl_slurm.wire.http import Caps, HttpReply, HttpRequest, parse_head, serve_http

NUMBER = int(os.environ.get("VERL_SLURM_HTTP_FUZZ", "1500"))
SEED = int(os.environ.get("VERL_SLURM_SEED", "1"))
SECRET = b"verl_run_step 7"
GOOD = b"GET /metrics HTTP/1.1\r\nHost: localhost:9464\r\nAuthorization: Bearer abc\r\nAccept: */*\r\n\r\n"
PIECES = (
    b"\r\n", b"\n", b"\x00", b"\xff", b" ", b":", b"GET ", b"POST ", b"HTTP/1.1", b"/../", b"%00", b"\x1b[31m",
    b"Content-Length: 99999\r\n", b"Transfer-Encoding: chunked\r\n", b"\xe2\x80\xa8", b"A" * 300, b"A: b\r\n" * 70,
)  # fmt: skip


def malformed(draw: random.Random) -> bytes:
    """Something that begins with no good request for the page: cut, too long, another one, or no text at all."""
    while True:
        data = bytearray(GOOD if draw.random() < 0.8 else draw.randbytes(draw.randrange(200)))
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(data) + 1)
            match draw.randrange(4):
                case 0:
                    data[at:at] = draw.choice(PIECES)
                case 1:
                    del data[at : at + draw.randrange(1, 20)]
                case 2 if at < len(data):
                    data[at] = draw.randrange(256)
                case 3:
                    data[at:at] = bytes(data[: draw.randrange(len(data) + 1)])
        if draw.random() < 0.01:
            data += draw.randbytes(20_000)
        head, end, _ = bytes(data).partition(b"\r\n\r\n")
        try:
            request = parse_head(head + end)
        except WireError:
            return bytes(data)
        if request.method != "GET" or request.path != "/metrics" or "content-length" in request.headers:
            return bytes(data)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def bombard() -> tuple[int, int, int]:
    """(requests answered with 200 and the page, growth of memory in bytes, descriptors left open)."""

    async def page(request: HttpRequest) -> HttpReply:
        return HttpReply(200, SECRET) if request.path == "/metrics" else HttpReply(404)

    draw, shown = random.Random(SEED), 0
    # A test knows when it is done with a connection; strangers are cut by the time.
    server, port = await serve_http("127.0.0.1", 0, page, Caps(patience_s=5.0))

    async def one(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            writer.write_eof()
            return await reader.read()
        except (ConnectionResetError, BrokenPipeError):
            return b""
        finally:
            writer.close()

    before, descriptors = 0, 0
    async with server:
        for number in range(NUMBER):
            data = malformed(draw)
            reply = await one(data)
            shown += SECRET in reply
            if number == NUMBER // 3:
                before, descriptors = resident_bytes(), len(os.listdir("/proc/self/fd"))
        left = len(os.listdir("/proc/self/fd")) - descriptors
        growth = resident_bytes() - before
        assert SECRET in await one(GOOD), "it no longer answers"
    return shown, growth, left


@pytest.mark.scenario("M13")
def test_malformed_requests_are_shown_nothing_and_cost_nothing_that_stays() -> None:
    shown, growth, left = asyncio.run(bombard())
    print(f"{NUMBER} requests, seed {SEED}: grew by {growth / 1024:.0f} KiB, {left} more descriptors")
    assert shown == 0, f"VERL_SLURM_SEED={SEED}"
    assert left <= 2
    assert growth < 1 << 20, growth
