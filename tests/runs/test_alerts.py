"""The receiver of alerts in docs/observability.md: who is heard, and what comes of it."""

import stat
from collections.abc import Iterator

import pytest

from tests.alert_receiver import alert, listening, post
from tests.journals import read_events
from tests.local_runs import prepared
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id

ACTION = "emergency_checkpoint"
STRANGER = "b" * 16
# Slurm is away at the first question, has no running job at the second, and job 7 from then on.
SLURM = """
import verl_slurm.runs.requests
from verl_slurm.base.errors import SlurmMissing
answers = iter([SlurmMissing("no answer", where="scontrol"), ""])
def ask_for_save(run):
    found = next(answers, "7")
    if isinstance(found, str):
        return found
    raise found
verl_slurm.runs.requests.ask_for_save = ask_for_save
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return prepared(tmp_path_factory.mktemp("alerts") / "run")


@pytest.fixture(scope="module")
def receiver(run: RunPaths) -> Iterator[tuple[str, str]]:
    """Its address, and the token that it has written."""
    token_file = run.root.parent / "token"
    with listening(run, token_file, before=SLURM) as (address, _):
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        yield address, token_file.read_text()


@pytest.mark.parametrize(
    ("token", "path", "status"),
    [("x" * 64, "/alert", 401), ("x" * 64, "/nowhere", 401), ("", "/", 404), ("", "/alert/../cancel", 404)],
)
def test_strangers_and_other_paths_move_nothing(
    run: RunPaths, receiver: tuple[str, str], token: str, path: str, status: int
) -> None:
    address, right = receiver
    body = alert(action=ACTION, run_id=run_id(run))
    assert post(address.replace("/alert", path), token or right, body) == (status, None)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"alerts": [\xff]}', b"[" * 100_000, alert(action=ACTION)])
def test_what_alertmanager_does_not_send_is_refused(receiver: tuple[str, str], body: bytes) -> None:
    assert post(*receiver, body) == (500, None)


@pytest.mark.parametrize(
    "body",
    [
        alert("resolved", action=ACTION, run_id=STRANGER),
        alert(action="cancel", run_id=STRANGER),
        alert(run_id=STRANGER),
    ],
)
def test_nothing_else_asks_for_anything(receiver: tuple[str, str], body: bytes) -> None:
    assert post(*receiver, body) == (200, {})


def test_a_known_run_is_asked_until_it_is_told_and_not_again_before_the_pause(
    run: RunPaths, receiver: tuple[str, str]
) -> None:
    number = run_id(run)
    body = alert(action=ACTION, run_id=number)
    status, told = post(*receiver, body)
    assert (status, told[number].startswith("failed: no answer")) == (503, True)
    assert post(*receiver, body) == (200, {number: "no job of it is running"})
    assert post(*receiver, body) == (200, {number: "asked job 7"})
    assert post(*receiver, body) == (200, {number: "asked already"})
    assert [e["job_id"] for e in read_events(run) if e["event"] == "alert_save_asked"] == ["7"]


def test_a_run_that_was_not_named_at_the_start_is_not_asked(receiver: tuple[str, str]) -> None:
    assert post(*receiver, alert(action=ACTION, run_id=STRANGER)) == (200, {STRANGER: "unknown run"})
