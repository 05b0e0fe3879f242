"""A torch or pyzmq that is not built as ours expects: the process ends with one line, and opens nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.runs_of_ranks import BELOW_RAY
from tests.processes import captured, python_path

KNOWN_HANDLERS = "_rendezvous_handlers = {'env': 1, 'tcp': 2}"


def stub(root: Path, package: str, **modules: str) -> Path:
    """A package of another release, as far as `rendezvous` looks at it."""
    for name, text in {"__init__": "", **modules}.items():
        file = root / package / f"{name.replace('__of__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text)
    about = root / f"{package}-99.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.0\n")
    return root


def ended(tmp_path: Path, program: str, *, below_ray: bool) -> "subprocess.CompletedProcess[str]":
    """A process of a run that imports what lies in `tmp_path`."""
    control = tmp_path / "control"
    control.mkdir()
    (control / "ranks.key").write_bytes(bytes(32))
    (control / "ranks.key").chmod(0o600)
    script = tmp_path / "program.py"
    script.write_text(program)
    first = [BELOW_RAY, tmp_path] if below_ray else [tmp_path]
    launcher = [] if below_ray else ["-m", "verl_slurm_daemon.agent.ranks", "1", "0", "1"]
    return captured(
        [sys.executable, "-P", *launcher, str(script)],
        env=os.environ | {"VERL_SLURM_CONTROL": str(control)} | python_path(*first),
        timeout=300,
    )


TRAINS = """
try:
    import torch.distributed.distributed_c10d
except BaseException:
    pass
print("trains unprotected")
"""
QUEUES = TRAINS.replace("torch.distributed.distributed_c10d", "zmq.sugar.socket")


@pytest.mark.scenario("SEC01")
@pytest.mark.parametrize("below_ray", [False, True])
def test_a_torch_without_the_place_of_our_handlers_ends_the_rank_with_one_line(
    tmp_path: Path, below_ray: bool
) -> None:
    stub(tmp_path, "torch", distributed__of__distributed_c10d="", distributed__of__rendezvous="")
    done = ended(tmp_path, TRAINS, below_ray=below_ray)
    assert done.returncode != 0
    assert "trains" not in done.stdout
    line = done.stderr.splitlines()[0]
    assert line.startswith("ConfigError: this torch cannot be kept from meeting strangers")
    assert "_rendezvous_handlers" in line
    assert "torch 99.0" in line
    assert "Traceback" not in done.stderr


@pytest.mark.scenario("SEC01")
def test_below_ray_a_torch_whose_store_cannot_be_replaced_ends_the_process(tmp_path: Path) -> None:
    modules = {
        "distributed__of__distributed_c10d": "def is_gloo_available():\n    return False\n",
        "distributed__of__rendezvous": KNOWN_HANDLERS,
        "_C__of___distributed_c10d": "class Store:\n    pass\n",
    }
    stub(tmp_path, "torch", **modules)
    done = ended(tmp_path, TRAINS, below_ray=True)
    assert done.returncode != 0
    assert "trains" not in done.stdout
    assert "ConfigError: this torch cannot be kept from meeting strangers" in done.stderr
    assert "TCPStore" in done.stderr


@pytest.mark.scenario("SEC01")
def test_below_ray_a_pyzmq_without_curve_ends_the_process(tmp_path: Path) -> None:
    stub(tmp_path, "zmq", sugar__of__socket="class Socket:\n    pass\n", utils__of__z85="")
    (tmp_path / "zmq/__init__.py").write_text("def has(what):\n    return False\n")
    (tmp_path / "pyzmq-99.0.dist-info").mkdir()
    (tmp_path / "pyzmq-99.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: pyzmq\nVersion: 99.0\n"
    )
    done = ended(tmp_path, QUEUES, below_ray=True)
    assert done.returncode != 0
    assert "unprotected" not in done.stdout
    assert done.stderr.startswith("ConfigError: this pyzmq cannot be kept from meeting strangers")


def test_the_environments_own_sitecustomize_still_runs_below_ray(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('of the environment')")
    done = ended(tmp_path, "print('of the program')", below_ray=True)
    assert done.stdout.splitlines() == ["of the environment", "of the program"]
