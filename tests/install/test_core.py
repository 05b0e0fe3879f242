"""The core installs and works without torch, transformers and numpy; what needs them says so in one line."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Installed = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = [pytest.mark.scenario("USE03"), pytest.mark.timeout(300), pytest.mark.slow]


def test_the_core_environment_has_neither_torch_nor_numpy(core: Path) -> None:
    probe = (
        "import importlib.util as u; print([m for m in ('torch', 'transformers', 'numpy') if u.find_spec(m)])"
    )
    done = subprocess.run(
        [core / "bin/python", "-I", "-c", probe], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("submit", "--help"),
        ("list", "."),
        ("devcluster", "--help"),
        ("devcluster", "status", "--dir", "nothing"),
        ("init", "--key", "my.key"),
    ],
    ids=" ".join,
)
def test_a_command_of_the_core_works_without_torch(installed: Installed, words: tuple[str, ...]) -> None:
    done = installed(*words)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_doctor_looks_at_this_machine_without_torch(installed: Installed) -> None:
    done = installed("doctor", "--json")
    assert done.returncode in (0, 13, 31), done.stderr  # 13: Slurm's commands may be here without a cluster
    assert json.loads(done.stdout)
    assert "No module" not in done.stderr


def test_the_daemon_starts_without_torch(core: Path) -> None:
    done = subprocess.run([core / "bin/verl-slurmd", "--help"], capture_output=True, text=True, check=True)
    assert "lead" in done.stdout


def test_a_run_that_needs_torch_is_refused_with_the_install_command(
    installed: Installed, tmp_path: Path
) -> None:
    done = installed("submit", "quickstart", "--cluster", "local", "--dry-run")
    assert done.returncode == 10
    (line,) = done.stderr.splitlines()
    assert "a run with trainer.backend: native needs the package torch, which is not installed" in line
    assert re.search(r"-m pip install '(/.*\.whl\[trainer\]|verl-slurm\[trainer\]==[\w.]+)'$", line), line
    assert not (tmp_path / "runs").exists()


def test_a_wrong_configuration_is_told_before_the_missing_package(installed: Installed) -> None:
    done = installed("submit", "quickstart", "train.stepz=3", "--cluster", "local")
    assert done.returncode == 10
    assert "no such key" in done.stderr


def test_the_status_of_a_run_is_shown_without_torch(installed: Installed, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "made-elsewhere"
    run.mkdir(parents=True, mode=0o700)
    (run / "run.yaml").write_text(f"name: made-elsewhere\nrun_dir: {run}\n")
    (run / "events.jsonl").write_text("")
    done = installed("status", run)
    assert done.returncode == 0, done.stderr
    assert "made-elsewhere" in done.stdout
    assert installed("list", run).returncode == 0
    assert installed("report", run).returncode == 0
    assert "made-elsewhere" in (tmp_path / "report.html").read_text()
