"""The benchmark of verl's ledger records what it says, and finds it again."""

import json
from pathlib import Path

import pytest

from benchmarks import response_ledger


def test_all_responses_are_recorded_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--responses", "5", "--tokens", "3", "--restored", "20", "--repetitions", "2", "--json"]
    response_ledger.main([*words, "--directory", str(tmp_path)])
    said = json.loads(capsys.readouterr().out)
    assert said["per_s"] > 0
    assert said["bytes"] > 0
    assert list(tmp_path.iterdir()) == []
