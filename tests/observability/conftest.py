"""Debian's Prometheus and Alertmanager, each as a process of the test; without them these tests are not run."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT

RULES = ROOT / "configs" / "observability"
_MISSING = [p for p in ("prometheus", "promtool", "prometheus-alertmanager") if shutil.which(p) is None]


@pytest.fixture(autouse=True)
def _needed() -> None:
    if _MISSING:
        pytest.skip(f"NOT RUN: {', '.join(_MISSING)} not here (make prometheus)")


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        data: bytes = answer.read()
        return data


class Server:
    """A process that listens on 127.0.0.1, and what it says."""

    def __init__(self, argv: list[str], port: int, log: Path) -> None:
        self.port, self.log = port, log
        with log.open("wb") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=out, cwd=log.parent)

    def until(self, found: Callable[[], Any], patience_s: float = 40.0) -> Any:
        """Ask again until there is an answer: Prometheus has nothing to wait on."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                if answer := found():
                    return answer
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(f"nothing for {patience_s} s\n{self.log.read_text()[-3000:]}")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        words = urllib.parse.urlencode({"query": expression})
        answer = json.loads(fetch(f"http://127.0.0.1:{self.port}/api/v1/query?{words}"))
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`start("prometheus", argv, port)`: runs until the test is over."""
    started: list[Server] = []

    def begin(name: str, argv: list[str], port: int) -> Server:
        server = Server(argv, port, tmp_path / f"{name}.log")
        started.append(server)
        return server

    yield begin
    for server in started:
        server.process.terminate()
    for server in started:
        server.process.wait(20)
