"""The wheel, installed where no checkout is, runs the examples that it ships."""

import json
import os
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from tests.install.conftest import ROOT, make_environment
from tests.lanes import with_variants
from tests.made_once import made_once

# verl's examples are for two nodes of eight GPUs, and Ray and TRL are in environments of their own: tests/verl,
# tests/slurm_cluster/test_ray_program.py and test_trl.py run these.
ELSEWHERE = ("verl_", "ray_", "trl_")
EXAMPLES = sorted(
    path.stem for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith(ELSEWHERE)
)

OFTEN = ("quickstart", "judged")
"""What other tests run again and again, from a checkout."""


@pytest.fixture(scope="module")
def whole(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and all that is installed here, but nothing of this checkout."""

    def make(place: Path) -> None:
        others = [one for one in metadata.distributions() if one.name != "verl-slurm"]
        make_environment(place, wheel, others)

    return made_once(tmp_path_factory, "whole", make)


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.scenario("USE03")
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.soak) for name in EXAMPLES if name in OFTEN),
        *with_variants(*(name for name in EXAMPLES if name not in OFTEN)),
    ],
)
def test_an_installed_wheel_runs_each_example_to_its_end(whole: Path, tmp_path: Path, name: str) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environ = clean | {"HOME": str(tmp_path), "PATH": f"{whole / 'bin'}:{os.environ['PATH']}"}

    def say(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [whole / "bin/verl-slurm", *words],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    # Fewer steps of our own trainer: the machine is for other tests, too.
    fewer = ["train.steps=3"] if name.startswith("quickstart") else []
    done = say("submit", name, *fewer, "--cluster", "local", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (path.parent for path in (tmp_path / "runs").glob("*/run.yaml"))
    told = json.loads(say("status", str(run), "--json").stdout)
    assert told["outcome"] == "done", told
