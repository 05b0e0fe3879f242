"""Another user holds connections to an HTTP port of ours, or the port itself; the bearer of the token is served."""

import contextlib
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.alert_receiver import listening, start
from tests.hostile.another_user import NOBODY, PYTHON_OF_NOBODY, needs_another_user
from tests.local_runs import finish, lead, prepared
from verl_slurm.base.files import write_file
from verl_slurm.base.paths import RunPaths

pytestmark = pytest.mark.slow

TOKEN = "t" * 64

# Holds connections, and opens each anew as soon as it is cut. Slow ones send a byte of a head now and then.
HOLD = """
import selectors, socket, sys
port, many, slow = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "slow"
chosen, made = selectors.DefaultSelector(), 0

def hold():
    line = socket.create_connection(("127.0.0.1", port))
    chosen.register(line, selectors.EVENT_READ)

for _ in range(many):
    hold()
chosen.register(sys.stdin, selectors.EVENT_READ)
print("held", flush=True)
while True:
    for key, _ in chosen.select(0.1):
        if key.fileobj is sys.stdin:
            sys.exit()
        try:
            gone = not key.fileobj.recv(4096)
        except OSError:
            gone = True
        if gone:
            chosen.unregister(key.fileobj)
            key.fileobj.close()
            hold()
    for key in list(chosen.get_map().values()) if slow else ():
        if key.fileobj is not sys.stdin:
            try:
                key.fileobj.send(b"G")
            except OSError:
                pass
"""

# Takes the port first, and shows what is brought.
SQUAT = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def nobodys(script: str, *words: str) -> Iterator[str]:
    """A process of the other user; gives its first line."""
    process = subprocess.Popen(
        [*PYTHON_OF_NOBODY, "-c", script, *words],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate(timeout=60)


@contextlib.contextmanager
def receiver(run: RunPaths, token: Path, port: int = 0) -> Iterator[tuple[int, str]]:
    """The port of a receiver, and its token."""
    with listening(run, token, port) as (address, _):
        yield int(address.rpartition(":")[2].partition("/")[0]), token.read_text()


def ask(port: int, method: str, path: str, token: str = TOKEN) -> int:
    """The status; 0: none was given."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        body = b'{"alerts": []}' if method == "POST" else None
        connection.request(method, path, body, {"Authorization": f"Bearer {token}"})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@pytest.fixture
def run(short_dir: Path) -> RunPaths:
    return prepared(short_dir / "run")


@pytest.fixture
def token(short_dir: Path) -> Path:
    write_file(short_dir / "token", TOKEN.encode())
    return short_dir / "token"


@needs_another_user
@pytest.mark.scenario("SEC03")
@pytest.mark.parametrize("how", ["idle", "slow"])
def test_every_alert_is_heard_whatever_strangers_hold(run: RunPaths, token: Path, how: str) -> None:
    with receiver(run, token) as (port, right):
        for many in (8, 24, 100, 800):
            with nobodys(HOLD, str(port), str(many), how) as said:
                assert said == "held"
                assert [ask(port, "POST", "/alert", right) for _ in range(30)] == [200] * 30, many
                assert ask(port, "POST", "/alert", "x" * 64) == 401


@needs_another_user
@pytest.mark.scenario("SEC03")
@pytest.mark.usefixtures("ranks_without_torch")
def test_the_metrics_are_scraped_whatever_strangers_hold(short_dir: Path, token: Path) -> None:
    run = prepared(
        short_dir / "run",
        "train.steps=1000",
        "observability.metrics_port=0",
        f"observability.token_file={token}",
        f"observability.targets_dir={short_dir}/targets",
    )
    process = lead(run)
    try:
        assert process.stdout is not None
        for _ in process.stdout:
            if files := list(short_dir.glob("targets/*.lead.json")):
                break
        port = int(json.loads(files[0].read_bytes())[0]["targets"][0].rpartition(":")[2])
        for many in (8, 24, 100):
            with nobodys(HOLD, str(port), str(many), "idle") as said:
                assert said == "held"
                assert [ask(port, "GET", "/metrics") for _ in range(30)] == [200] * 30, many
                assert ask(port, "GET", "/metrics", "x" * 64) == 401
    finally:
        process.send_signal(signal.SIGINT)  # a cancel
        finish(process)


@pytest.mark.scenario("M13", "SEC03")
def test_every_alert_is_heard_while_strangers_send_heads_full_of_blanks(run: RunPaths, token: Path) -> None:
    head = b"POST /alert HTTP/1.1\r\na:" + b"%s\xff\r\n\r\n"
    with listening(run, token) as (address, process):
        port, right = int(address.rpartition(":")[2].partition("/")[0]), token.read_text()
        try:
            for blanks in (b" " * 8000, b"\t" * 8000, b"x " * 4000, b"x" + b" " * 7999):
                with socket.create_connection(("127.0.0.1", port), 30) as stranger:
                    stranger.sendall(head % blanks)
                    assert ask(port, "POST", "/alert", right) == 200
                    assert stranger.recv(64).startswith(b"HTTP/1.1 400")
        finally:
            process.kill()  # one that matches a head for hours does not see SIGTERM


@needs_another_user
@pytest.mark.scenario("SEC11")
def test_a_port_that_another_user_took_is_told_and_the_token_replaced(run: RunPaths, token: Path) -> None:
    with nobodys(SQUAT, "0") as port:
        refused = start(run, token, int(port))
        _, said = refused.communicate(timeout=120)
        assert refused.returncode == 1, said
        assert f"uid {NOBODY}" in said
        assert token.read_text() == TOKEN, "a new one now would be sent to him as well"
    with receiver(run, token, int(port)) as (mine, new):
        assert new != TOKEN
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert ask(mine, "POST", "/alert") == 401
        assert ask(mine, "POST", "/alert", new) == 200


@pytest.mark.scenario("SEC11")
def test_a_port_that_we_hold_ourselves_is_told(run: RunPaths, token: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        refused = start(run, token, mine.getsockname()[1])
        _, said = refused.communicate(timeout=120)
    assert refused.returncode == 1
    assert f"uid {os.geteuid()}" in said
    assert token.read_text() == TOKEN
