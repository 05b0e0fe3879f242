"""The server of the live pages: who gets an answer, to what, and when a page is told of news."""

import asyncio
import json
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.interrupted_runs import HOSTILE, HOSTILE_NAME
from tests.journals import append_event, make_event
from tests.many_runs import make_run
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.events import kind_of
from verl_slurm.report import serve
from verl_slurm.report.live_runs import LiveRuns, row_of
from verl_slurm.report.page import render_list
from verl_slurm.report.serve import Server
from verl_slurm.runs import follow
from verl_slurm.runs.glance import Glance
from verl_slurm.slurm.slurm_client import SlurmClient


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often Slurm was asked: an entry each time. All jobs run."""
    times: list[int] = []

    async def states(_: SlurmClient, users: set[int]) -> dict[int, tuple[str, str, str, str, str]]:
        times.append(1)
        return {7: ("RUNNING", "", "", "", "")}

    monkeypatch.setattr(SlurmClient, "states", states)
    return times


@pytest.fixture
def runs(tmp_path: Path, asked: object) -> Path:
    place = tmp_path / "runs"
    make_run(place / "a", num_checkpoints=0)
    make_run(place / "team" / "b", "done", num_checkpoints=0)
    return place


class Client:
    """A browser's connections to the server; `cookie` is empty until the token was exchanged."""

    def __init__(self, address: str) -> None:
        self.port = int(address.split(":")[2].partition("/")[0])
        self.entrance = address[address.index("/?") :]
        self.cookie, self.folder = "", "/"
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, str]:
        """Returns the status, a reader of the body, and the head."""
        given = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        # As a browser keeps it, whose cookie has that path.
        if path != self.entrance and not path.startswith(self.folder):
            path = self.folder + path.removeprefix("/")
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value)]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.writers.append(writer)
        return int(head.split()[1]), reader, head

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        """Returns status, head and body."""
        status, reader, head = await self.open(path, method, **headers)
        body = (await reader.read()).decode()
        await self.leave()
        return status, head, body

    async def leave(self) -> None:
        """Closes the newest connection."""
        writer = self.writers.pop()
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    async def enter(self) -> str:
        _, head, _ = await self.get(self.entrance)
        self.cookie = head.partition("Set-Cookie: ")[2].partition(";")[0]
        self.folder = head.partition("Location: ")[2].partition("\r\n")[0]
        return head


@asynccontextmanager
async def served(place: Path) -> AsyncIterator[Client]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(Server(place, kind_of).run(0, lambda address, _: ready.set_result(address)))
    try:
        client = Client(await ready)
        yield client
        while client.writers:
            await client.leave()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def play(place: Path, story: Callable[[Client], Awaitable[None]], *, enter: bool = True) -> None:
    async def whole() -> None:
        async with asyncio.timeout(20), served(place) as client:
            if enter:
                await client.enter()
            await story(client)

    asyncio.run(whole())


async def news(reader: Any) -> dict[str, Any]:
    lines = (await reader.readuntil(b"\n\n")).decode().splitlines()
    found: dict[str, Any] = json.loads(lines[1].removeprefix("data: "))
    return found


def test_nothing_is_answered_without_the_token(runs: Path) -> None:
    async def story(client: Client) -> None:
        for path in ("/", "/run/a", "/events?since=0", "/nothing", "/?token=", "/?token=" + "A" * 43):
            status, head, body = await client.get(path)
            assert status == 403, path
            assert "Set-Cookie" not in head
            assert "team" not in body
        for cookie in (f"verl_slurm_{client.port}=x", f"verl_slurm_{client.port}", "=;=", "é"):
            assert (await client.get("/", Cookie=cookie))[0] in (400, 403)

    play(runs, story, enter=False)


def test_the_token_is_exchanged_for_a_cookie_and_leaves_the_address(runs: Path) -> None:
    async def story(client: Client) -> None:
        head = await client.enter()
        assert head.startswith("HTTP/1.1 303")
        assert len(client.folder) == 45
        assert f"; HttpOnly; SameSite=Strict; Path={client.folder}\r\n" in head
        assert client.folder.strip("/") not in client.entrance
        status, head, body = await client.get("/")
        assert status == 200
        assert "team/b" in body
        assert client.cookie.partition("=")[2] not in body
        for line in (
            "frame-ancestors 'none'",
            "X-Frame-Options: DENY",
            "Referrer-Policy: no-referrer",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
        ):
            assert line in head

    play(runs, story, enter=False)


def test_another_name_and_another_site_get_nothing(runs: Path) -> None:
    async def story(client: Client) -> None:
        for host in ("evil.example", f"evil.example:{client.port}", "127.0.0.1", "127.0.0.1:1", ""):
            assert (await client.get("/", Host=host))[0] == 403, host
        assert (await client.get("/", Host=f"localhost:{client.port}"))[0] == 200
        for site in ("cross-site", "same-site"):
            assert (await client.get("/events?since=0", Sec_Fetch_Site=site))[0] == 403
        assert (await client.get("/", Sec_Fetch_Site="none"))[0] == 200

    play(runs, story)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_it_takes_no_method_but_get(method: str, runs: Path) -> None:
    async def story(client: Client) -> None:
        assert (await client.get("/", method))[0] == 405

    play(runs, story)


def test_no_path_leads_out_of_the_runs_that_were_found(runs: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "secret", num_checkpoints=0)
    (runs / "out").symlink_to(tmp_path / "secret")

    async def story(client: Client) -> None:
        assert "secret" not in (await client.get("/"))[2]
        for path in (
            *("../secret", "%2e%2e/secret", "..%2fsecret", "a/../a", "./a", "/a", "a/", "out", "", "."),
            *("a/run.yaml", "%00", "a%00", "%ff", "%", "team", "a?token", str(tmp_path / "secret")),
        ):
            expected = 303 if "token" in path else 404
            assert (await client.get(f"/run/{path}"))[0] == expected, path
        for path in ("/events?since=0&run=..%2fsecret", "/run", "/static/x", "//run/a"):
            assert (await client.get(path))[0] == 404, path
        for since in ("x", "-1", "1e9", "9" * 30, "%31", "٣"):
            assert (await client.get(f"/events?since={since}"))[0] == 400, since
        assert (await client.get("/" + "x" * 9000))[0] == 431
        # A link that somebody puts into the place of a run is not followed either.
        shutil.rmtree(runs / "a")
        (runs / "a").symlink_to(tmp_path / "secret")
        assert (await client.get("/run/a"))[0] == 404

    play(runs, story)


def test_a_row_is_told_after_a_line_of_the_journal(runs: Path, asked: list[int]) -> None:
    async def story(client: Client) -> None:
        _, _, body = await client.get("/")
        version = body.partition('data-version="')[2].partition('"')[0]
        assert asked == []
        _, reader, _ = await client.open(f"/events?since={version}")
        # Slurm is asked when a page is open, and its answer is news: until then nobody knows.
        assert [row["state"] for row in (await news(reader))["rows"]] == ["running"]
        append_event(RunPaths(runs / "team" / "b"), "submitted", job_id="8", cluster="slurm")
        found = await news(reader)
        assert [(row["run"], row["state"], row["last"]) for row in found["rows"]] == [
            ("team/b", "queued", "submitted")
        ]
        assert found["summary"] == "2 runs: 1 running, 1 queued"
        make_run(runs / "new", "done", num_checkpoints=0)
        assert "new" in [row["run"] for row in (await news(reader))["rows"]]
        assert len(asked) == 1

    play(runs, story)


def test_its_end_does_not_wait_for_a_file_system_that_does_not_answer(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, never, answered = threading.Event(), threading.Event(), list[bool]()

    def read(*_: object, **__: object) -> None:
        reading.set()
        answered.append(never.wait(30))

    async def story(client: Client) -> None:
        monkeypatch.setattr(LiveRuns, "look", read)
        await client.open("/events?since=0")
        await asyncio.to_thread(reading.wait)

    play(runs, story)
    assert answered == []
    never.set()


def test_the_page_of_a_run_hears_of_that_run_alone(runs: Path) -> None:
    async def story(client: Client) -> None:
        status, head, page = await client.get("/run/team/b")
        assert status == 200
        assert "connect-src 'self'" in head
        events = page.partition('data-events="')[2].partition('"')[0].replace("&amp;", "&")
        assert events.endswith("&run=team%2Fb")
        _, reader, _ = await client.open(events)
        append_event(RunPaths(runs / "a"), "saved", name="step_9")
        append_event(RunPaths(runs / "team" / "b"), "saved", name="step_9")
        assert [row["run"] for row in (await news(reader))["rows"]] == ["team/b"]

    play(runs, story)


def test_slurm_is_asked_while_a_page_is_open_and_never_else(
    runs: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_ASK_S", 0.0)
    monkeypatch.setattr(follow, "_LOOK_S", 0.01)

    async def story(client: Client) -> None:
        for _ in range(3):
            await client.get("/")
        assert asked == []
        _, reader, _ = await client.open("/events?since=0")
        await news(reader)
        while len(asked) < 3:
            await client.get("/")
        await client.leave()
        # Until the server has noticed it: a few requests later no question has followed the last one.
        before = -1
        while len(asked) != before:
            before = len(asked)
            for _ in range(20):
                await client.get("/")

    play(runs, story)


def test_the_streams_have_a_limit(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_MOST_STREAMS", 2)

    async def story(client: Client) -> None:
        for _ in range(2):
            _, reader, _ = await client.open("/events?since=0")
            await asyncio.wait_for(news(reader), 5)
        assert (await client.get("/events?since=0"))[0] == 503
        assert (await client.get("/"))[0] == 200

    play(runs, story)


def test_a_removed_run_leaves_the_list_and_closed_and_prepared_ones_are_on_it(runs: Path) -> None:
    prepared = runs / "prepared"
    prepared.mkdir()
    (prepared / "run.yaml").write_text("name: prepared\n")

    async def story(client: Client) -> None:
        assert "3 runs: 1 running?, 1 done, 1 prepared" in (await client.get("/"))[2]
        shutil.rmtree(runs / "a")
        assert "2 runs: 1 done, 1 prepared" in (await client.get("/"))[2]

    play(runs, story)


def test_a_run_by_itself_is_served_too(runs: Path) -> None:
    async def story(client: Client) -> None:
        assert 'href="run/b"' in (await client.get("/"))[2]
        assert (await client.get("/run/b"))[0] == 200

    play(runs / "team" / "b", story)


def test_hostile_text_is_text_in_a_row_and_in_the_table() -> None:
    event = make_event("warning", topic="x", text=HOSTILE)
    seen = Glance(
        root=Path("/x"),
        last=event,
        status={"metrics": {"reward": HOSTILE}, "step": HOSTILE, "steps": HOSTILE},
    )
    name = os.fsdecode(b"\xff\n" + HOSTILE_NAME.encode())
    row = row_of(name, HOSTILE, seen, lambda _: HOSTILE)
    assert row.link.startswith("run/%FF%0A%3C%21")
    assert all(text.isprintable() for text in (row.run, row.state, row.step, row.last))
    page = render_list([row], HOSTILE, 1, HOSTILE)
    assert "<script>window" not in page
    assert "<b onclick" not in page
    assert "<img" not in page


def test_a_port_that_is_taken_is_told_with_its_holder(runs: Path) -> None:
    from verl_slurm.cli.main import cli

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(Exception, match="the port is taken by uid"):
            cli.main(["serve", str(runs), "--port", port], standalone_mode=False)
