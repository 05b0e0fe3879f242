"""The benchmark's small form: forty agents in place of a thousand. How long it takes is not for a test to say."""

import json

import pytest

from benchmarks import agents


def test_every_request_reaches_every_agent_in_silence_and_in_talk(capsys: pytest.CaptureFixture[str]) -> None:
    assert agents.main(["--agents", "40", "--processes", "2", "--rounds", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"agents", "joined_s", "silent", "talking", "load"}
    assert (found["agents"], found["silent"]["rounds"], found["talking"]["rounds"]) == (40, 3, 3)
    for kind in ("silent", "talking"):
        assert 0 < found[kind]["median_ms"] <= found[kind]["max_ms"]
    assert "40 agents" in agents.table(found)
