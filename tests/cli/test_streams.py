"""Standard output that is closed, full or no longer read ends every command without a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes import with_variants
from tests.many_runs import make_run
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.cli.main import COMMANDS
from verl_slurm.journal.steps import append_step
from verl_slurm.runtime_state.samples import Sample, append_samples

pytestmark = [pytest.mark.scenario("USE19"), pytest.mark.slow]
_AT_WORK = (
    "status RUN",
    "watch RUN --json",
    "list .",
    "nonsense",
    "status RUN --json",
    "list . --json",
    "list RUN",
    "watch RUN",
    "prune RUN --dry-run",
    "config",
    "config train",
    "status nowhere",
    "devcluster status --dir nothing",
)
# Every help goes the same way: one often, the others by `make soak`.
_HELP = [
    pytest.param(f"{name} --help", marks=[pytest.mark.soak] if at >= 1 else [])
    for at, name in enumerate(COMMANDS)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("streams")
    make_run(directory / "run", "done")
    return directory


def run(place: Path, words: str, stdout: int | None) -> subprocess.CompletedProcess[str]:
    """Run the command with this standard output; None: with none at all."""
    argv = [sys.executable, "-m", "verl_slurm.cli", *words.replace("RUN", str(place / "run")).split()]
    if stdout is None:
        argv = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *argv]
    return subprocess.run(
        argv,
        cwd=place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if stdout is None else stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [*_HELP, *with_variants("--help", "--version"), *with_variants(*_AT_WORK, keep=4)]
)
def test_a_closed_full_or_unread_output_ends_a_command_quietly(place: Path, words: str) -> None:
    usual = run(place, words, subprocess.DEVNULL)
    closed = run(place, words, None)
    assert (closed.returncode, closed.stderr) == (usual.returncode, usual.stderr), "as with /dev/null"
    with open("/dev/full", "wb") as full:
        overflowing = run(place, words, full.fileno())
    reader, writer = os.pipe()
    os.close(reader)
    unread = run(place, words, writer)
    os.close(writer)
    for done in (closed, overflowing, unread):
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
    if usual.returncode == 0:  # it prints something
        assert overflowing.returncode == ExitCode.OUTPUT
        assert overflowing.stderr.splitlines()[-1].startswith("verl-slurm: standard output cannot be written")
        assert len(overflowing.stderr.splitlines()) == len(usual.stderr.splitlines()) + 1
        assert (unread.returncode, unread.stderr) == (ExitCode.PIPE, usual.stderr)


def test_a_standard_error_that_is_full_changes_no_exit_code(place: Path) -> None:
    argv = [sys.executable, "-m", "verl_slurm.cli", "status", "nowhere"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(argv, cwd=place, stderr=full, stdout=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    "locale",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "iso8859-1"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
    ids=["ascii", "latin", "C"],
)
def test_an_output_that_lacks_a_character_gets_its_escape(tmp_path: Path, locale: dict[str, str]) -> None:
    paths = make_run(tmp_path / "run", "done", num_checkpoints=0)
    append_step(paths, 1, {"step": 1.0, "reward": 0.25})
    said = Sample(
        sample_id=1, prompt="几", response="二 \U0001f600", answer="二", reward=1.0, response_tokens=1
    )
    append_samples(paths, 1, 1, 8, [said])
    paths.logs.mkdir()
    (paths.logs / "7_0_log.out").write_text("加载 é\n")

    def told(*words: str) -> str:
        argv = [sys.executable, "-m", "verl_slurm.cli", *words]
        environment = {
            name: text for name, text in os.environ.items() if not name.startswith(("LC_", "PYTHONU"))
        }
        done = subprocess.run(
            argv, cwd=tmp_path, env=environment | locale, capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, b""), done
        return done.stdout.decode("latin-1")

    assert "\n--------" in told("list", ".")
    assert "\n--------" in told("status", "run")
    assert "\\u4e8c \\U0001f600" in told("samples", "run")
    assert "\\u52a0\\u8f7d" in told("logs", "run")
    assert json.loads(told("samples", "run", "--json"))["response"] == said.response
    assert json.loads(told("status", "run", "--json"))["step"]
    assert told("--help")
