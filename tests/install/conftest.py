"""The wheel, built once, and an environment that holds its core and nothing more."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from email import message_from_bytes
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.made_once import made_once

ROOT = Path(__file__).parents[2]
_SOURCES = ("verl_slurm", "daemon", "configs", "sbatch", "docs", "constraints")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves a build directory beside the sources."""

    def make(place: Path) -> None:
        copy = place / "source"
        for name in _SOURCES:
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            if (ROOT / name).exists():
                shutil.copy(ROOT / name, copy)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", place, copy], check=True, timeout=120)

    (found,) = made_once(tmp_path_factory, "wheel", make).glob("*.whl")
    return found


@pytest.fixture(scope="session")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and what its metadata asks for without extras. No network.

    The dependencies are links to the files that are installed here already; the wheel is unpacked as pip does it.
    """

    def make(place: Path) -> None:
        make_environment(place, wheel, [metadata.distribution(name) for name in _closure(wheel)])

    return made_once(tmp_path_factory, "core", make)


def make_environment(place: Path, wheel: Path, others: Iterable[metadata.Distribution]) -> None:
    """A virtual environment with the wheel, and links to other distributions that are installed here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=60)
    (site,) = place.glob("lib/python*/site-packages")
    for distribution in others:
        link(distribution, site)
    command = [sys.executable, "-m", "pip", "--python", place / "bin/python", "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", wheel], check=True, timeout=120)


@pytest.fixture
def installed(core: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`installed("list", ".")`: run the installed command in a directory that is no checkout."""

    def run(*words: object, cwd: Path = tmp_path, **environ: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        path = f"{core / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            [core / "bin/verl-slurm", *map(str, words)],
            cwd=cwd,
            env=clean | {"PATH": path, "HOME": str(tmp_path)} | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def metadata_of(wheel: Path) -> Message:
    """The wheel's METADATA."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(file.read(name))


def _closure(wheel: Path) -> set[str]:
    """Names of all distributions that the wheel without extras needs, its own left out."""
    wanted = metadata_of(wheel).get_all("Requires-Dist") or []
    found: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name.lower() not in found:
            found.add(requirement.name.lower())
            wanted += metadata.requires(requirement.name) or []
    return found


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Link the top-level files and packages of one distribution into another environment."""
    origin = Path(str(distribution.locate_file("")))
    tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        if not (site / top).exists():
            (site / top).symlink_to(origin / top)
