"""`verl-slurm alert-receiver`: who is heard, and what comes of it."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.journals import read_events
from verl_slurm.base.errors import SlurmMissing
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.run.alert_receiver import ACTION, _Receiver
from verl_slurm.wire.http import HttpReply, HttpRequest

KNOWN, STRANGER, TOKEN = "a" * 16, "b" * 16, "t" * 64


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(private_dir(tmp_path / "run"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RunPaths]:
    """The runs that were asked to save; each has job 7."""
    told: list[RunPaths] = []

    def ask(run: RunPaths) -> str:
        told.append(run)
        return "7"

    monkeypatch.setattr("verl_slurm.cli.run.alert_receiver.ask_for_save", ask)
    return told


def post(
    receiver: _Receiver, *runs: str, token: str = TOKEN, path: str = "/alert", body: bytes = b""
) -> HttpReply:
    alerts = [{"status": "firing", "labels": {"action": ACTION, "run_id": run}} for run in runs]
    body = body or json.dumps({"alerts": alerts}).encode()
    request = HttpRequest("POST", path, {}, body, bearer=token == TOKEN)
    return asyncio.run(receiver._answer(request))


def receiver_of(run: RunPaths, pause_s: float = 600.0) -> _Receiver:
    return _Receiver({KNOWN: run}, run.root / "token", pause_s, as_json=True)


def test_a_known_run_is_asked_once_and_not_again_before_the_pause(
    run: RunPaths, asked: list[RunPaths]
) -> None:
    receiver = receiver_of(run)
    assert json.loads(post(receiver, KNOWN).body) == {KNOWN: "asked job 7"}
    assert json.loads(post(receiver, KNOWN).body) == {KNOWN: "asked already"}
    assert asked == [run]
    assert [(e["event"], e["job_id"]) for e in read_events(run)] == [("alert_save_asked", "7")]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"token": "x" * 64}, 401),
        ({"token": "x" * 64, "path": "/nowhere"}, 401),
        ({"path": "/"}, 404),
        ({"path": "/alert/../cancel"}, 404),
        ({"body": b"not json"}, 400),
    ],
)
def test_strangers_and_what_is_no_alert_move_nothing(
    run: RunPaths, asked: list[RunPaths], request_: dict[str, Any], status: int
) -> None:
    assert post(receiver_of(run), KNOWN, **request_).status == status
    assert asked == []


def test_a_run_that_was_not_named_at_the_start_is_not_asked(run: RunPaths, asked: list[RunPaths]) -> None:
    assert json.loads(post(receiver_of(run), STRANGER).body) == {STRANGER: "unknown run"}
    assert asked == []


def test_where_slurm_does_not_answer_alertmanager_is_to_come_again(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(run: RunPaths) -> str:
        raise SlurmMissing("no answer", where="scontrol")

    receiver = receiver_of(run)
    with monkeypatch.context() as patch:
        patch.setattr("verl_slurm.cli.run.alert_receiver.ask_for_save", away)
        reply = post(receiver, KNOWN)
        assert (reply.status, b"failed" in reply.body) == (503, True)
    monkeypatch.setattr("verl_slurm.cli.run.alert_receiver.ask_for_save", lambda run: "7")
    assert post(receiver, KNOWN).status == 200


def test_a_run_without_a_running_job_is_told_so_and_may_be_asked_again(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["", "8"])
    monkeypatch.setattr("verl_slurm.cli.run.alert_receiver.ask_for_save", lambda run: next(answers))
    receiver = receiver_of(run)
    assert json.loads(post(receiver, KNOWN).body) == {KNOWN: "no job of it is running"}
    assert json.loads(post(receiver, KNOWN).body) == {KNOWN: "asked job 8"}


@pytest.mark.parametrize(("mode", "code"), [(0o644, 12), (0o600, 28)])
def test_it_does_not_start_with_a_token_that_is_none(
    workplace: Path, cli: Cli, mode: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("submit", "config.yaml", "--prepare-only").code == 0
    token = workplace / "token"
    write_file(token, b"short" if mode == 0o600 else b"t" * 64)
    token.chmod(mode)

    def never(*args: object) -> Callable[..., None]:
        raise AssertionError("it listened")

    monkeypatch.setattr("verl_slurm.cli.run.alert_receiver.serve_http", never)
    result = cli("alert-receiver", workplace / "runs" / "demo", "--token-file", token)
    assert result.code == code
    assert "t" * 64 not in result.err + result.out
