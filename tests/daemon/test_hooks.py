"""Hooks as a lead calls them: real programs, a real HTTP server, and no lead."""

import asyncio
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from verl_slurm_daemon.lead.hook_runs import Hooks, hooks_of, sentence

from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import HooksConfig, RunConfig
from verl_slurm.journal import events as ev

pytestmark = pytest.mark.slow

GOOD = ev.Verified("step_000004", "9 bytes")
AGAIN = ev.Requeue(True, "requeued")
REQUEUED = ev.Ended(25, "REQUEUED", "requeued", None)
DONE = ev.Ended(0, "OK", "all steps are done", None)
CANCELLED = ev.Ended(23, "CANCELLED", "cancelled", None)
FAILED = ev.Ended(22, "CRASHED", "too many crashes", None)


def tell(tmp_path: Path, *events: ev.Event, requeued: bool = False, **hooks: Any) -> tuple[list[str], float]:
    """What was complained about, and the seconds that telling and draining took."""
    config = msgspec.structs.replace(RunConfig(), hooks=HooksConfig(**hooks))
    said: list[str] = []

    async def work() -> float:
        calls = Hooks(RunPaths(tmp_path), config, said.append)
        began = time.monotonic()
        for event in events:
            calls.hear(event)
        await calls.drain(requeued=requeued)
        return time.monotonic() - began

    return said, asyncio.run(work())


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def make(body: str) -> str:
        path = tmp_path / f"hook{len(list(tmp_path.glob('hook*')))}.sh"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.mark.parametrize(
    ("event", "hooks"),
    [
        (GOOD, ("on_checkpoint", "webhook")),
        (AGAIN, ("on_requeue", "webhook")),
        (ev.Requeue(False, "no answer"), ()),
        (REQUEUED, ()),
        (DONE, ("on_end", "webhook")),
        (CANCELLED, ("on_end", "webhook")),
        (FAILED, ("on_end", "webhook")),
        (ev.Notice("Slurm", "text"), ()),
    ],
)
def test_each_event_calls_its_hooks(event: ev.Event, hooks: tuple[str, ...]) -> None:
    assert hooks_of(event) == hooks
    assert "\n" not in sentence("run", event)


def test_a_command_gets_the_event_and_its_arguments(tmp_path: Path, script: Callable[[str], str]) -> None:
    hook = script('cat > told; echo "$1 $VERL_SLURM_HOOK $PWD" >> told')
    said, _ = tell(tmp_path, GOOD, on_checkpoint=(hook, "two words"))
    assert said == []
    line, rest = (tmp_path / "told").read_text().splitlines()
    told = json.loads(line)
    assert (told["event"], told["name"], told["run_dir"]) == ("verified", "step_000004", str(tmp_path))
    assert told["text"] == "run: checkpoint step_000004 was read back and is good"
    assert rest == f"two words on_checkpoint {tmp_path}"


def test_a_command_has_the_umask_of_who_submitted(
    tmp_path: Path, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SLURM_UMASK", "002")
    tell(tmp_path, GOOD, on_checkpoint=(script("umask > told"),))
    assert (tmp_path / "told").read_text() == "0002\n"


def test_calls_of_one_hook_come_in_order_and_one_at_a_time(
    tmp_path: Path, script: Callable[[str], str]
) -> None:
    hook = script(
        "mkdir busy || echo both >> told; cut -d'\"' -f 20 >/dev/null; sleep 0.05; rmdir busy; echo one >> told"
    )
    said, _ = tell(tmp_path, *[GOOD] * 5, on_checkpoint=(hook,))
    assert (said, (tmp_path / "told").read_text()) == ([], "one\n" * 5)


def test_a_slow_hook_holds_up_no_other_and_is_ended_with_its_children(
    tmp_path: Path, script: Callable[[str], str]
) -> None:
    slow, quick = script("sleep 600 & echo $! > child; wait"), script("touch told")
    said, seconds = tell(tmp_path, GOOD, AGAIN, on_checkpoint=(slow,), on_requeue=(quick,), timeout_s=0.5)
    assert (tmp_path / "told").exists()
    assert said == ["hooks.on_checkpoint: no end after 0.5 s"]
    assert seconds < 30
    child = int((tmp_path / "child").read_text())
    with suppress(ProcessLookupError), open(os.pidfd_open(child), "rb", buffering=0) as gone:
        assert select.select([gone], [], [], 30.0)[0]


def test_a_requeued_job_waits_for_its_hooks_for_seconds_alone(
    tmp_path: Path, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_slurm_daemon.lead.hook_runs._REQUEUE_S", 0.2)
    _, seconds = tell(tmp_path, AGAIN, requeued=True, on_requeue=(script("exec sleep 600"),), timeout_s=600.0)
    assert seconds < 60


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("echo no network >&2; exit 3", "exit code 3: no network"),
        ("exit 1", "exit code 1"),
        (None, "No such file"),
    ],
)
def test_a_hook_that_fails_is_told_once(
    tmp_path: Path, script: Callable[[str], str], body: str | None, told: str
) -> None:
    hook = script(body) if body else str(tmp_path / "gone")
    (problem,), _ = tell(tmp_path, GOOD, GOOD, GOOD, on_checkpoint=(hook,))
    assert problem.startswith(f"hooks.on_checkpoint: {told}")


def test_without_hooks_nothing_is_started(tmp_path: Path) -> None:
    assert tell(tmp_path, GOOD, AGAIN, FAILED)[0] == []


class Server(ThreadingHTTPServer):
    def __init__(self, code: int) -> None:
        self.code, self.got = code, list[tuple[dict[str, Any], str | None]]()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((body, self.headers["Authorization"]))
        self.send_response(self.server.code)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=[204])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_webhook_gets_json_with_a_sentence_and_its_token(tmp_path: Path, server: Server) -> None:
    token = tmp_path / "token"
    token.write_text("sesame\n")
    token.chmod(0o600)
    url = f"http://127.0.0.1:{server.server_port}/secret"
    said, _ = tell(tmp_path, GOOD, FAILED, webhook=url, webhook_token_file=str(token))
    assert said == []
    assert [(body["event"], sent) for body, sent in server.got] == [
        ("verified", "Bearer sesame"),
        ("ended", "Bearer sesame"),
    ]
    assert server.got[1][0]["text"] == "run: ended with CRASHED: too many crashes"


@pytest.mark.parametrize("server", [302, 500], indirect=True)
def test_a_server_that_refuses_or_sends_elsewhere_is_told_without_the_address(
    tmp_path: Path, server: Server
) -> None:
    (problem,), _ = tell(tmp_path, GOOD, webhook=f"http://127.0.0.1:{server.server_port}/secret")
    assert problem == f"hooks.webhook: exit code 1: 127.0.0.1 answered {server.code}"
    assert len(server.got) == 1


@pytest.mark.parametrize("how", ["nobody listens", "hangs up"])
def test_a_server_that_does_not_answer_is_told_without_the_address(tmp_path: Path, how: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.close()

        thread = threading.Thread(target=hang_up)
        if how == "hangs up":
            listener.listen()
            thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/secret"
        (problem,), _ = tell(tmp_path, GOOD, webhook=url)
        if how == "hangs up":
            thread.join()
    assert "127.0.0.1 does not answer" in problem
    assert "secret" not in problem
