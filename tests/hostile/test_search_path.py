"""PYTHONPATH with an empty or a relative element, in a directory full of modules that somebody else has planted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.another_user import NOBODY
from tests.local_runs import prepared
from tests.processes import captured
from verl_slurm.base.exit_codes import ExitCode

pytestmark = [pytest.mark.scenario("SEC08"), pytest.mark.slow]

MODULES = (
    "msgspec",
    "click",
    "ruamel",
    "typing",
    "json",
    "psutil",
    "argparse",
    "zstandard",
    "numpy",
    "submitit",
)
WITNESS = """
import os, sys
with open({witness!r}, "a") as file:
    print(__name__, *sys.argv[:3], file=file)
raise ImportError("planted")
"""
BIN = Path(sys.executable).parent
PROGRAMS = {
    "console script": [str(BIN / "verl-slurm"), "list", "."],
    "the CLI as a module": [sys.executable, "-P", "-m", "verl_slurm.cli", "list", "."],
    "the daemon's console script": [str(BIN / "verl-slurmd"), "lead", "--help"],
    "the daemon as a module": [sys.executable, "-P", "-m", "verl_slurm_daemon", "lead", "--help"],
}


@pytest.fixture
def eves(tmp_path: Path) -> Path:
    """A directory of another user's with modules of hers, which write down who has imported them."""
    place = tmp_path / "eve"
    place.mkdir(mode=0o755)
    for name in MODULES:
        (place / f"{name}.py").write_text(WITNESS.format(witness=str(tmp_path / "witness")))
    if os.geteuid() == 0:
        os.chown(place, NOBODY, NOBODY)
    return place


def run(
    argv: list[str], place: Path, path: str, timeout_s: float = 120
) -> "subprocess.CompletedProcess[str]":
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SLURM"))}
    return captured(argv, cwd=place, env=environ | {"PYTHONPATH": path}, timeout=timeout_s)


@pytest.mark.parametrize(
    ("program", "path"),
    [
        *((program, "/opt/mylib:") for program in PROGRAMS),
        *(("console script", path) for path in (":/opt/mylib", ":", ".", "/opt/mylib:../eve")),
    ],
)
def test_a_program_imports_nothing_from_the_working_directory(program: str, path: str, eves: Path) -> None:
    done = run(PROGRAMS[program], eves, path)
    assert not (eves.parent / "witness").exists(), (eves.parent / "witness").read_text()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("PYTHONPATH has ") == 1


def test_absolute_places_are_kept_and_nothing_is_said(eves: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "msgspec.py").write_text(WITNESS.format(witness=str(tmp_path / "witness")))
    done = run(PROGRAMS["console script"], eves, str(mine))
    assert "msgspec" in (tmp_path / "witness").read_text(), "the user's own place is meant"
    assert "PYTHONPATH has" not in done.stderr


def test_python_m_leaves_the_working_directory_as_well(eves: Path) -> None:
    done = run([sys.executable, "-m", "verl_slurm.cli", "list", "."], eves, "")
    assert not (eves.parent / "witness").exists()
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long  # the rules by which each of them imports are shown above
@pytest.mark.torch
def test_lead_agents_and_ranks_of_a_whole_run_import_nothing_of_hers(eves: Path, short_dir: Path) -> None:
    paths = prepared(short_dir / "run", "train.steps=1")
    argv = [sys.executable, "-P", "-m", "verl_slurm_daemon", "lead", "--run", str(paths.root)]
    done = run(argv, eves, "/opt/mylib:", timeout_s=500)
    assert not (eves.parent / "witness").exists(), (eves.parent / "witness").read_text()
    assert done.returncode == ExitCode.OK, done.stdout[-2000:] + done.stderr[-2000:]
