"""Runs the receiver of alerts that docs/observability.md shows."""

import contextlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.harness import ROOT
from verl_slurm.base.paths import RunPaths

_PAGE = (ROOT / "docs" / "observability.md").read_text()
(PROGRAM,) = re.findall(r'^```python\n("""Has runs save.*?)^```$', _PAGE, re.DOTALL | re.MULTILINE)


def start(
    run: RunPaths, token_file: Path, port: int = 0, *, before: str = "", env: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Starts the program; `before`: statements that replace what it imports."""
    return subprocess.Popen(
        [sys.executable, "-c", before + PROGRAM, str(port), str(token_file), str(run.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=env,
    )


@contextlib.contextmanager
def listening(
    run: RunPaths, token_file: Path, port: int = 0, *, before: str = "", env: Mapping[str, str] | None = None
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A receiver that listens, and its address."""
    process = start(run, token_file, port, before=before, env=env)
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()
        assert words, process.communicate()[1]
        yield words[2], process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def post(address: str, token: str, body: bytes) -> tuple[int, Any]:
    """Returns the status of the answer, and its JSON."""
    request = urllib.request.Request(address, body, {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refused:
        text = refused.read()
        return refused.code, json.loads(text) if text.startswith(b"{") else None


def alert(status: str = "firing", **labels: object) -> bytes:
    """A group of one alert, as Alertmanager sends it."""
    return json.dumps({"version": "4", "alerts": [{"status": status, "labels": labels}]}).encode()
