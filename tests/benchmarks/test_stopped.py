"""A benchmark that is stopped keeps what it has measured."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from benchmarks.save.records import Answer, Run
from tests.harness import ROOT
from tests.processes import python_path

pytestmark = pytest.mark.torch


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.variant
def test_a_stopped_benchmark_keeps_its_samples_in_a_file_that_says_so(
    tmp_path: Path, number: signal.Signals
) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "out.json"
    scratch.mkdir()
    argv = [sys.executable, "-m", "benchmarks.save", "--gib", "0.004", "--reps", "500", "--quiet-s", "0"]
    argv += ["--generation-s", "0.05", "--what", "stall", "--peers", "ours,copy,raw"]
    argv += ["--dir", str(tmp_path), "--json", str(out)]
    environ = os.environ | python_path() | {"TMPDIR": str(scratch)}
    # A shell's background job hands an ignored SIGINT down.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(argv, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process as bench:
        deadline = time.monotonic() + 300
        while not any(len(_samples(part)) >= 4 for part in scratch.glob("*/*.part")):
            assert bench.poll() is None, bench.stderr and bench.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        bench.send_signal(number)
        assert bench.stderr is not None
        said = bench.stderr.read()
        assert bench.wait(60) == 130, said
    assert not out.exists()
    partial = tmp_path / "out.json.partial"
    assert str(partial) in said
    run = msgspec.json.decode(partial.read_bytes(), type=Run)
    assert run.stopped
    assert len(run.samples) >= 4
    assert run.state_bytes
    show = [sys.executable, "-m", "benchmarks.save", "--show", str(partial)]
    shown = subprocess.run(show, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert "STOPPED by a signal" in shown.stdout
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(scratch) in str(p.info["cmdline"])]


def _samples(part: Path) -> list[object]:
    return [*msgspec.json.decode(part.read_bytes(), type=Answer).samples]


@pytest.mark.long
@pytest.mark.variant
def test_a_stopped_benchmark_goes_on_behind_its_last_whole_part(tmp_path: Path) -> None:
    out, partial = tmp_path / "out.json", tmp_path / "out.json.partial"
    argv = [sys.executable, "-m", "benchmarks.save", "--gib", "0.004", "--reps", "1", "--quiet-s", "0"]
    argv += ["--generation-s", "0.05", "--what", "stall,memory", "--peers", "ours,copy,raw"]
    argv += ["--dir", str(tmp_path), "--json", str(out)]
    environ = os.environ | python_path() | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(argv, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True) as bench:
        said = _until_line(bench, "memory: ours")
        bench.kill()  # nothing can be written any more: what is there is what was kept behind the part
    assert any(line.startswith("[1 of 2] main") for line in said)
    first = msgspec.json.decode(partial.read_bytes(), type=Run)
    assert list(first.done) == ["main"]
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in str(process.info["cmdline"]):  # another test has workers, too
            process.kill()
    resume = [sys.executable, "-m", "benchmarks.save", "--resume", str(partial), "--dir", str(tmp_path)]
    done = subprocess.run(resume, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "main" not in done.stderr, "it is not measured again"
    run = msgspec.json.decode(out.read_bytes(), type=Run)
    assert not run.stopped
    assert list(run.done) == ["main", "memory: ours"]
    assert run.samples[: len(first.samples)] == first.samples
    assert not partial.exists()


def _until_line(bench: "subprocess.Popen[str]", word: str) -> list[str]:
    assert bench.stderr is not None
    seen = []
    for line in bench.stderr:
        seen.append(line)
        if word in line:
            return seen
    raise AssertionError(seen)
