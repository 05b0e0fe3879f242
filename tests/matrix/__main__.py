"""Runs the tests beside the oldest and the newest packages that pyproject.toml allows: `make test-matrix`.

Each set has an environment of its own in `.test-matrix/`, resolved by uv from PyPI, with PyPI's builds of torch: those
for CUDA, which import without a GPU. In it run the quick tests, those with torch included, and runs on the embedded
Slurm that are preempted in the middle of a step, save, and resume. At last pip says what it would install beside verl's
own pins.
"""

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".test-matrix"
ROOM_GIB = 12
"""What torch for CUDA and all of its libraries take up while they are unpacked, beside uv's cache of them."""

UV = "uv==0.13.9"
TOOLS = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "accelerate",
    "lightning",
    "pyarrow",
    "boto3",
    "ruff",
    "import-linter",
)
QUICK = "not slow and not long and not slurm and not vllm and not verl and not trl"
PREEMPTED = (
    "tests/slurm_cluster/test_interruptions.py::test_a_preemption_in_mid_phase_is_saved_requeued_and_resumed"
)
VERL = ("verl==0.9.1", "torch==2.11.0", "transformers==5.9.0", "vllm==0.24.0")


@dataclass(frozen=True)
class Packages:
    """One set: a Python, and which of the allowed releases uv chooses."""

    python: str
    resolution: str


SETS = {
    # Of what we depend on ourselves the oldest; what that depends on is the newest that goes with it.
    "oldest": Packages("3.11", "lowest-direct"),
    "newest": Packages("3.13", "highest"),
}


def main() -> int:
    """Runs the chosen sets one after the other; returns 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(SETS)} and verl; default: all")
    chosen = parser.parse_args().parts or [*SETS, "verl"]
    if unknown := set(chosen) - {*SETS, "verl"}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    PLACE.mkdir(exist_ok=True)
    uv = _uv()
    return max(_resolve_beside_verl(uv) if part == "verl" else _run(uv, part) for part in chosen)


def _run(uv: str, name: str) -> int:
    wanted = SETS[name]
    place = PLACE / name
    python = _python(wanted.python)
    free = shutil.disk_usage(PLACE).free / 2**30
    if python is None:
        print(f"{name}: NOT RUN: no Python {wanted.python} here", flush=True)
        return 0
    if not place.exists() and free < ROOM_GIB:
        print(f"{name}: NOT RUN: {free:.0f} GiB free below {PLACE}, {ROOM_GIB} are needed", flush=True)
        return 0
    _install(uv, place, python, wanted.resolution)
    run = str(place / "bin/python")
    look = (
        "import platform as p, torch as t, transformers as h, numpy as n; print(f'Python {p.python_version()}, torch "
        "{t.__version__} for CUDA {t.version.cuda}, transformers {h.__version__}, numpy {n.__version__}')"
    )
    said = subprocess.run([run, "-c", look], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{name}: {said}", flush=True)
    pytest = [run, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    quick = subprocess.run([*pytest, "-n", "2", "--dist", "worksteal", "-m", QUICK], cwd=ROOT, check=False)
    if shutil.which("slurmctld") is None:
        print(f"{name}: the preempted run is NOT RUN: no Slurm here", flush=True)
        return int(quick.returncode != 0)
    preempted = subprocess.run([*pytest, "-rs", PREEMPTED], cwd=ROOT, check=False)
    return int(quick.returncode != 0 or preempted.returncode != 0)


def _install(uv: str, place: Path, python: str, resolution: str) -> None:
    """Makes the environment; once made it stays, until its folder is removed or pyproject.toml changes."""
    ready = place / ".ready"
    if ready.exists() and ready.stat().st_mtime > (ROOT / "pyproject.toml").stat().st_mtime:
        return
    shutil.rmtree(place, ignore_errors=True)
    # A CPU build that a machine's own configuration offers must not take the place of PyPI's.
    pip = [uv, "pip", "install", "--quiet", "--no-config", "--python", str(place / "bin/python")]
    subprocess.run([uv, "venv", "--quiet", "--no-config", "--python", python, place], check=True)
    subprocess.run([*pip, "--resolution", resolution, "-e", f"{ROOT}[trainer]"], check=True)
    list_all = [uv, "pip", "freeze", "--no-config", "--exclude-editable", "--python", place / "bin/python"]
    chosen = place.with_suffix(".txt")
    chosen.write_bytes(subprocess.run(list_all, capture_output=True, check=True).stdout)
    # The tests' own tools must move nothing that was chosen.
    subprocess.run([*pip, "--constraint", chosen, *TOOLS], check=True)
    ready.touch()


def _resolve_beside_verl(uv: str) -> int:
    """Lets pip say what it would install for `verl-slurm[verl,vllm]` beside verl's own pins; it downloads 4 GB."""
    place = PLACE / "resolve"
    if not place.exists():
        subprocess.run(
            [uv, "venv", "--quiet", "--no-config", "--seed", "--python", sys.executable, place], check=True
        )
    words = [
        "--dry-run",
        "--ignore-installed",
        "--only-binary",
        ":all:",
        "--no-binary",
        "antlr4-python3-runtime",
    ]
    done = subprocess.run(
        [place / "bin/python", "-m", "pip", "install", "--quiet", *words, f"{ROOT}[verl,vllm]", *VERL],
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
        check=False,
    )
    print(
        f"verl: pip {'finds all' if done.returncode == 0 else 'finds no way'} beside {' '.join(VERL)}",
        flush=True,
    )
    return int(done.returncode != 0)


def _python(version: str) -> str | None:
    """Returns a Python of that version: on the PATH, or of pyenv."""
    names = [f"python{version}", *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for name in names:
        found = shutil.which(name)
        # pyenv's shims are on the PATH for versions, too, that they do not start.
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


def _uv() -> str:
    """Returns uv, from an environment of its own: pip cannot choose the oldest releases."""
    tool = PLACE / "uv"
    if not (tool / "bin/uv").exists():
        subprocess.run([sys.executable, "-m", "venv", tool], check=True)
        subprocess.run([tool / "bin/python", "-m", "pip", "install", "--quiet", UV], check=True)
    return str(tool / "bin/uv")


if __name__ == "__main__":
    sys.exit(main())
