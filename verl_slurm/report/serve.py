"""The server of `verl-slurm serve`: a table of runs and the page of each, to one user's browsers, read-only.

| path | answer |
| --- | --- |
| `/?token=TOKEN` | a cookie, and a redirect to `/FOLDER/` |
| `/FOLDER/` | the table of runs |
| `/FOLDER/run/PATH` | the page of a run, by its path below the directory |
| `/FOLDER/events?since=N` | server-sent events: the rows that are newer than version N, as they change |
| `/FOLDER/events?since=N&run=PATH` | likewise, of one run |

FOLDER is random: a browser sends its cookie to all ports of a host, but only with paths below FOLDER, which no other
site or server is told. Nothing is answered without the token, nor under another host's name. Limits of bytes,
time and connections: `wire/http.py`.
"""

import asyncio
import hmac
import os
import secrets
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote_to_bytes

import msgspec

from verl_slurm.base.one_line import json_line
from verl_slurm.journal.events import Event
from verl_slurm.report.live_runs import LiveRuns
from verl_slurm.report.page import LIST_SCRIPTS, LIVE_SCRIPTS, policy_of, render_list
from verl_slurm.wire.http import Caps, HttpReply, HttpRequest, serve_http

T = TypeVar("T")

HOST = "127.0.0.1"
_PAGE_S = 60.0
_PAGES_AT_ONCE = 2
_MOST_STREAMS = 32
_HTML = "text/html; charset=utf-8"
_HEADERS = (
    ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
)


class Task(msgspec.Struct, frozen=True):
    """The page that a child is to make (`report/__main__.py`)."""

    root: bytes
    state: str
    alive: bool | None
    events: str
    """Address of the page's events."""


class Server:
    """Serves the runs below `place`; `tell` puts an event into words. For one `run`."""

    def __init__(self, place: Path, tell: Callable[[Event], str]) -> None:
        self._runs = LiveRuns(place, tell)
        self._token = secrets.token_urlsafe(32)
        self._folder = f"/{secrets.token_urlsafe(32)}/"
        self._hosts: frozenset[str] = frozenset()
        self._cookie = ""
        self._streams = 0
        self._watched = asyncio.Event()
        """A page is open."""
        self._changed = asyncio.Event()
        """Set once, when rows have changed; then there is another one."""
        self._reading = asyncio.Lock()
        self._pages = asyncio.Semaphore(_PAGES_AT_ONCE)

    async def run(self, port: int, on_ready: Callable[[str, int], None]) -> None:
        """Serves until it is cancelled. `port` 0: any free one.

        `on_ready` is called with the address, which holds the token, and the number of runs.

        Raises:
            OSError: the port is taken, or the directory cannot be read.
        """
        await self._update(self._runs.look)
        caps = Caps(bearers=2 * _MOST_STREAMS)
        server, port = await serve_http(HOST, port, self._answer, caps, self._token, carries=self._carries)
        # With the port: cookies of all ports of a host are in one jar.
        self._cookie = f"verl_slurm_{port}"
        self._hosts = frozenset({f"{HOST}:{port}", f"localhost:{port}"})
        async with server, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_while_watched())
            on_ready(f"http://{HOST}:{port}/?token={self._token}", len(self._runs.rows))

    # ---- keeping the rows up to date

    async def _update(self, read: Callable[[], object]) -> None:
        async with self._reading:
            await _in_thread(read)
            if self._runs.apply():
                self._changed.set()
                self._changed = asyncio.Event()

    async def _look_while_watched(self) -> None:
        while True:
            await self._watched.wait()
            await self._update(lambda: self._runs.look(ask=True))
            await asyncio.sleep(self._runs.look_s)

    # ---- who may ask

    def _carries(self, request: HttpRequest, token: str) -> bool:
        """Returns whether a request carries the token: in its query, or in the cookie that it was exchanged for."""
        given = _query(request).get("token") or self._from_cookie(request)
        return hmac.compare_digest(given.encode(errors="replace"), token.encode())

    def _from_cookie(self, request: HttpRequest) -> str:
        try:
            found = SimpleCookie(request.headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value

    async def _answer(self, request: HttpRequest) -> HttpReply:
        reply = await self._allowed(request)
        own = {name for name, _ in reply.headers}
        common = tuple(header for header in _HEADERS if header[0] not in own)
        return msgspec.structs.replace(reply, headers=(*reply.headers, *common))

    async def _allowed(self, request: HttpRequest) -> HttpReply:
        if request.headers.get("host", "") not in self._hosts:
            # A hostile site may have its own name lead here (DNS rebinding).
            return HttpReply(403, b"This server answers under http://127.0.0.1:PORT alone.\n")
        if not request.bearer:
            return HttpReply(
                403, b"Open the address that `verl-slurm serve` has printed: it holds a token.\n"
            )
        if "token" in _query(request):
            # Out of the address: that is kept in histories and shown to others.
            cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path={self._folder}"
            return HttpReply(303, headers=(("Location", self._folder), ("Set-Cookie", cookie)))
        # SameSite does not keep pages of other ports of this host from asking.
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return HttpReply(403)
        return await self._page(request)

    # ---- answers

    async def _page(self, request: HttpRequest) -> HttpReply:
        before, folder, path = request.path.partition(self._folder)
        if before or not folder:
            return HttpReply(404)
        if path == "events":
            return self._events(request)
        # Nothing is looked at while no page is open.
        await self._update(self._runs.look)
        if not path:
            runs = self._runs
            runs.drop(await _in_thread(runs.removed))
            text = render_list(runs.changed_since(-1), runs.summary, runs.version, str(runs.place))
            return _html(text.encode(), LIST_SCRIPTS)
        prefix, _, name = path.partition("run/")
        run = _decoded(name)
        # By comparison with the runs that were found: `..` is in none of their paths.
        if prefix or run not in self._runs.rows:
            return HttpReply(404)
        return await self._page_of(run)

    async def _page_of(self, run: str) -> HttpReply:
        root = self._runs.above / run
        # It was found without a link on the way; somebody may have put one there.
        if await _in_thread(lambda: os.path.realpath(root)) != str(root):
            return HttpReply(404)
        version, (state, alive) = self._runs.version, self._runs.known(run)
        events = f"{self._folder}events?since={version}&run={quote(os.fsencode(run), safe='')}"
        task = Task(root=os.fsencode(root), state=state, alive=alive, events=events)
        async with self._pages:
            code, page, problem = await _child(msgspec.json.encode(task))
        if code:
            return HttpReply(500, b"The page cannot be made; `verl-slurm report` says why.\n" + problem)
        return _html(page, LIVE_SCRIPTS)

    def _events(self, request: HttpRequest) -> HttpReply:
        query = _query(request)
        # The browser brings what it has seen when it connects again.
        since = request.headers.get("last-event-id", query.get("since", "0"))
        run = _decoded(query["run"]) if "run" in query else None
        if not (since.isascii() and since.isdecimal() and len(since) < 16):
            return HttpReply(400)
        if run is not None and run not in self._runs.rows:
            return HttpReply(404)
        if self._streams >= _MOST_STREAMS:
            return HttpReply(503)
        return HttpReply(200, content_type="text/event-stream", stream=self._stream(int(since), run))

    async def _stream(self, version: int, run: str | None) -> AsyncGenerator[bytes, None]:
        self._streams += 1
        self._watched.set()
        try:
            while True:
                changed = self._changed
                rows = self._runs.changed_since(version, run)
                # The list is also told what the scheduler's trouble is.
                if rows or (run is None and self._runs.version > version):
                    version = self._runs.version
                    news = {"summary": self._runs.summary, "rows": rows}
                    yield b"id: %d\ndata: %s\n\n" % (version, json_line(news).rstrip())
                await changed.wait()
        finally:
            self._streams -= 1
            if not self._streams:
                self._watched.clear()


def _html(page: bytes, scripts: tuple[str, ...]) -> HttpReply:
    policy = f"{policy_of(scripts, live=True)}; frame-ancestors 'none'"
    return HttpReply(200, page, _HTML, (("Content-Security-Policy", policy),))


def _query(request: HttpRequest) -> dict[str, str]:
    parts = (part.partition("=") for part in request.query.split("&") if part)
    return {name: value for name, _, value in parts}


def _decoded(name: str) -> str:
    return os.fsdecode(unquote_to_bytes(name))


async def _in_thread(work: Callable[[], T]) -> T:
    """Returns the result of `work` on files."""
    # A file system may be slow, and requests are answered meanwhile.
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # who waits for it may leave, and it has its result all the same

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            future.set_exception(error)

    # No executor: the interpreter would wait for its threads, and a file system may never answer.
    threading.Thread(target=run, daemon=True, name="files").start()
    return await asyncio.wrap_future(future)


async def _child(task: bytes) -> tuple[int, bytes, bytes]:
    """Has a page made; returns the exit code, the page, and the error in words."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "verl_slurm.report"), stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(_PAGE_S):
            page, problem = await child.communicate(task)
    except TimeoutError:
        return 1, b"", b"It took too long.\n"
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    # Of a traceback, which names files and lines, nothing goes out: the report on the command line has it.
    return child.returncode or 0, page, problem if problem.count(b"\n") == 1 else b""
