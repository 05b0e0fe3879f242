"""An image that does not fit says so in one line, before anything of ours is imported in it."""

import subprocess
import sys

import pytest

import verl_slurm
from tests.builders import run_config
from verl_slurm.config.schema import ContainerConfig
from verl_slurm.containers import runtimes


def look(*inside: str) -> subprocess.CompletedProcess[str]:
    config = run_config(container=ContainerConfig(image="/i.sif", python=sys.executable))
    argv = runtimes.probe_argv(config, inside)
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_an_image_that_fits_runs_the_module_with_its_arguments() -> None:
    done = look("timeit", "-n1", "-r1", "print('it ran')")
    assert "it ran" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "what", "remedy"),
    [
        (
            "version",
            "99.0",
            f"the image has another version of verl-slurm: /i.sif (found {verl_slurm.__version__}, expected 99.0)",
            "--no-deps verl-slurm==99.0",
        ),
        (
            "packages",
            ("torch", "no_such_package", "no_such.package"),
            "the image lacks what ranks import: /i.sif (found no no_such_package, no no_such.package, expected them)",
            "no_such_package no_such.package",
        ),
    ],
)
def test_an_image_that_does_not_fit_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, what: str, remedy: str
) -> None:
    if name == "version":
        monkeypatch.setattr(verl_slurm, "__version__", value)
    else:
        monkeypatch.setattr(runtimes, "RANK_PACKAGES", value)
    done = look("timeit")
    assert done.returncode == 1
    assert done.stderr == f"ConfigError: {what}; in the image: {sys.executable} -m pip install {remedy}\n"
