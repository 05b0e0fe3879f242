"""The small HTTP server: what it takes, what it refuses, and whom it does not wait for."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from verl_slurm.base.errors import KeyRefused, PermissionRefused, WireError
from verl_slurm.wire.connection_limits import ROW, make_room
from verl_slurm.wire.http import Caps, HttpReply, HttpRequest, has_token, parse_head, read_token, serve_http

GOOD = b"GET /metrics?x=1 HTTP/1.1\r\nHost: localhost:9464\r\nAccept:  text/plain \r\n\r\n"


def test_a_request_is_read_with_its_query_apart() -> None:
    assert parse_head(GOOD) == HttpRequest(
        "GET", "/metrics", {"host": "localhost:9464", "accept": "text/plain"}, query="x=1"
    )


@pytest.mark.scenario("M13")
@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics HTTP/2.0\r\n\r\n",
        b"get /metrics HTTP/1.1\r\n\r\n",
        b"GET metrics HTTP/1.1\r\n\r\n",
        b"GET  /metrics HTTP/1.1\r\n\r\n",
        b"GET /met rics HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 2600 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\x1b[31m\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\ncontent-length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"A%d: x\r\n" % n for n in range(65)) + b"\r\n",
    ],
)
def test_what_two_readers_may_take_differently_is_refused(head: bytes) -> None:
    with pytest.raises(WireError):
        parse_head(head)


@pytest.mark.scenario("M13")
@pytest.mark.parametrize(
    ("before", "after"), [(b"", b""), (b"", b"\xff"), (b"x", b"y"), (b"x", b"\x00"), (b"", b"y\x7f")]
)
@pytest.mark.parametrize("blank", [b" ", b"\t", b" \t", b"x "], ids=repr)
def test_a_head_full_of_blanks_is_judged_at_once(before: bytes, blank: bytes, after: bytes) -> None:
    for num_bytes in (1024, 16 * 1024):
        value = before + blank * (num_bytes // len(blank)) + after
        began = time.process_time()
        try:
            found = parse_head(b"GET / HTTP/1.1\r\na:" + value + b"\r\n\r\n").headers
        except WireError:
            found = {}
        assert time.process_time() - began < 0.2, num_bytes
        assert found == ({"a": value.strip().decode()} if after in (b"", b"y") else {})


@pytest.mark.parametrize(
    ("line", "headers"),
    [
        (b"a:", {"a": ""}),
        (b"a: \t ", {"a": ""}),
        (b"A:b", {"a": "b"}),
        (b"a:\t b: c\td  ", {"a": "b: c\td"}),
        (b"x" * 64 + b": y", {"x" * 64: "y"}),
        (b"x" * 65 + b": y", None),
        (b": y", None),
        (b"a", None),
        (b"a b: y", None),
        (b" a: y", None),
        (b"a: \x0b", None),
        (b"\xe4: y", None),
        (b"a: \xe4", None),
    ],
)
def test_a_header_is_a_token_and_printable_text_without_blanks_around_it(
    line: bytes, headers: dict[str, str] | None
) -> None:
    head = b"GET / HTTP/1.1\r\n" + line + b"\r\n\r\n"
    if headers is not None:
        assert parse_head(head).headers == headers
        return
    with pytest.raises(WireError):
        parse_head(head)


@pytest.mark.parametrize(
    ("header", "good"),
    [
        ("Bearer " + "t" * 32, True),
        ("bearer " + "t" * 32, True),
        ("Bearer " + "t" * 31, False),
        ("Basic " + "t" * 32, False),
        ("t" * 32, False),
        ("", False),
    ],
)
def test_only_the_whole_token_opens(header: str, good: bool) -> None:
    assert has_token(HttpRequest("GET", "/", {"authorization": header}), "t" * 32) is good


@pytest.mark.scenario("M08")
def test_a_token_comes_from_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(KeyRefused, match="openssl rand"):
        read_token(file)
    file.write_text("t" * 40 + "\n")
    file.chmod(0o600)
    assert read_token(file) == "t" * 40
    file.chmod(0o640)
    with pytest.raises(PermissionRefused):
        read_token(file)
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(KeyRefused) as refused:
        read_token(file)
    assert "short" not in str(refused.value)


# ---- over a real socket


def test_a_stream_is_closed_when_its_reader_has_gone() -> None:
    async def story() -> None:
        closed = asyncio.Event()

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                yield b"first"
                await asyncio.Event().wait()
            finally:
                closed.set()

        async def handle(_: HttpRequest) -> HttpReply:
            return HttpReply(200, stream=pieces())

        server, port = await serve_http("127.0.0.1", 0, handle, Caps())
        async with server:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GOOD)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length" not in head
            assert await reader.readexactly(5) == b"first"
            assert not closed.is_set()
            writer.close()
            await asyncio.wait_for(closed.wait(), 10)

    asyncio.run(story())


async def _hello(request: HttpRequest) -> HttpReply:
    return HttpReply(200, f"{request.path} {len(request.body)}".encode())


async def _say(port: int, data: bytes, *, end: bool = False) -> bytes:
    """What is answered, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        return await reader.read()
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


def answered(
    *requests: bytes,
    caps: Caps | None = None,
    handle: Callable[[HttpRequest], Awaitable[HttpReply]] = _hello,
    end: bool = False,
) -> list[bytes]:
    async def talk() -> list[bytes]:
        server, port = await serve_http("127.0.0.1", 0, handle, caps or Caps())
        async with server:
            return [await _say(port, request, end=end) for request in requests]

    return asyncio.run(talk())


def test_one_request_is_answered_and_the_connection_is_closed() -> None:
    (reply,) = answered(GOOD + GOOD)
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert reply.endswith(b"\r\n\r\n/metrics 0")
    assert b"Connection: close\r\n" in reply


@pytest.mark.scenario("M13")
@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", b"413"),
        (b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"\x16\x03\x01 TLS hello\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 8192 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"a" * 100_000, b"431"),
    ],
)
def test_what_does_not_fit_is_answered_with_its_status_where_it_can_be(
    request_: bytes, status: bytes
) -> None:
    (reply,) = answered(request_)
    # Unread bytes make the kernel send a reset, which may overtake the answer.
    assert reply.startswith(b"HTTP/1.1 " + status) or (reply == b"reset" and len(request_) > 8192)


@pytest.mark.scenario("M13")
def test_a_head_of_exactly_the_cap_is_taken() -> None:
    head = b"GET / HTTP/1.1\r\nA: " + b"a" * (8192 - 23) + b"\r\n\r\n"
    assert len(head) == 8192
    assert answered(head)[0].startswith(b"HTTP/1.1 200")
    assert b" 200 " not in answered(head.replace(b"A: ", b"A: a"))[0][:16]


def test_a_body_is_taken_where_the_port_is_for_one_and_up_to_its_cap() -> None:
    caps = Caps(method="POST", body_bytes=5)
    post = b"POST /alert HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s"
    taken, large, without, get = answered(
        post % (5, b"12345"), post % (6, b"123456"), b"POST / HTTP/1.1\r\n\r\n", GOOD, caps=caps
    )
    assert taken.endswith(b"/alert 5")
    assert [reply[9:12] for reply in (large, without, get)] == [b"413", b"411", b"405"]


@pytest.mark.scenario("M13")
def test_whoever_is_slow_is_cut() -> None:
    impatient = Caps(patience_s=0.05)
    for part in (b"", b"GET /", GOOD[:-1]):
        assert answered(part, caps=impatient) == [b""]


@pytest.mark.scenario("M13")
def test_whoever_leaves_in_the_middle_hurts_nobody_and_a_bug_is_a_500_without_a_word_of_it() -> None:
    async def broken(request: HttpRequest) -> HttpReply:
        raise RuntimeError(f"secret {request}")

    (reply,) = answered(GOOD, handle=broken)
    assert reply.startswith(b"HTTP/1.1 500")
    assert b"secret" not in reply
    assert answered(GOOD[:-1], b"", end=True) == [b"", b""]


@pytest.mark.scenario("M13", "SEC03")
def test_the_oldest_silent_strangers_make_room_for_newer_ones() -> None:
    async def talk() -> tuple[int, bytes]:
        server, port = await serve_http("127.0.0.1", 0, _hello, Caps(patience_s=60.0))
        async with server:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(ROW + 40)]
            taken = await _say(port, GOOD)
            cut = sum(reader.at_eof() or reader.exception() is not None for reader, _ in silent)
            for _, writer in silent:
                writer.close()
            return cut, taken

    make_room(4 * ROW)
    cut, taken = asyncio.run(talk())
    assert taken.startswith(b"HTTP/1.1 200")
    assert 1 <= cut <= 40


@pytest.mark.scenario("SEC03")
def test_the_token_has_places_of_its_own_and_no_body_of_a_stranger_is_kept() -> None:
    token, post = "t" * 64, b"POST / HTTP/1.1\r\nContent-Length: 3\r\nAuthorization: Bearer %s\r\n\r\nabc"
    heard: list[tuple[bool, bytes]] = []

    async def hear(request: HttpRequest) -> HttpReply:
        heard.append((request.bearer, request.body))
        return HttpReply(200 if request.bearer else 401)

    async def talk() -> list[bytes]:
        caps = Caps(method="POST", body_bytes=5, bearers=1)
        server, port = await serve_http("127.0.0.1", 0, hear, caps, token)
        async with server:
            whole = post % token.encode()
            _, held = await asyncio.open_connection("127.0.0.1", port)
            held.write(whole[:-1])
            answers = [await _say(port, post % (b"x" * 64))]
            answers.append(await _say(port, whole))  # the one place is taken by a body that does not come
            held.close()
            return answers

    strange, full = asyncio.run(talk())
    assert strange.startswith(b"HTTP/1.1 401")
    assert full in (b"", b"reset")
    assert heard == [(False, b"")]
