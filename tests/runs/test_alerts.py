"""What is read out of an alert, and when a run is asked."""

import json
from typing import Any

import pytest

from verl_slurm.base.errors import WireError
from verl_slurm.cli.run.alert_receiver import ACTION, decide_saves, runs_to_save

A, B, C = "a" * 16, "b" * 16, "c" * 16


def hook(*alerts: tuple[str, dict[str, str]]) -> bytes:
    told = [{"status": status, "labels": labels, "annotations": {}} for status, labels in alerts]
    return json.dumps({"version": "4", "status": "firing", "alerts": told}).encode()


def test_each_run_of_a_firing_alert_that_asks_for_a_save_is_named_once() -> None:
    asking = {"action": ACTION, "alertname": "X"}
    body = hook(
        ("firing", asking | {"run_id": B}),
        ("firing", asking | {"run_id": A}),
        ("firing", asking | {"run_id": B, "rank": "0"}),
    )
    assert runs_to_save(body) == [B, A]


@pytest.mark.parametrize(
    "alert",
    [
        ("resolved", {"action": ACTION, "run_id": A}),
        ("firing", {"action": "cancel", "run_id": A}),
        ("firing", {"run_id": A}),
        ("firing", {"action": ACTION}),
        ("firing", {"action": ACTION, "run_id": "../../etc"}),
        ("firing", {"action": ACTION, "run_id": A + "\n"}),
        ("firing", {"action": ACTION, "run_id": "1; rm -rf"}),
    ],
)
def test_nothing_else_asks_for_anything(alert: tuple[str, dict[str, str]]) -> None:
    assert runs_to_save(hook(alert)) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"alerts": {}}',
        b'{"alerts": [{"status": "firing"}]}',
        b'{"alerts": [{"status": "firing", "labels": {"action": 1}}]}',
        b'{"alerts": [\xff]}',
        b"[" * 100_000,
        b'{"alerts": [' + b",".join([b'{"status": "firing", "labels": {}}'] * 1025) + b"]}",
    ],
)
def test_what_alertmanager_does_not_send_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        runs_to_save(body)


def test_a_run_is_asked_if_it_is_known_and_was_not_asked_just_now() -> None:
    last: dict[str, Any] = {A: 100.0, B: 50.0}
    verdicts = decide_saves([A, B, C], frozenset({A, B}), last, 650.0, 600.0)
    assert verdicts == {A: "asked already", B: "save", C: "unknown run"}
    assert decide_saves([A], frozenset({A}), {}, 0.0, 600.0) == {A: "save"}
