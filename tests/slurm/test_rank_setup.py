"""What a node does before its ranks start, run by a real bash; modules by Debian's Environment Modules."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from verl_slurm.config.schema import SlurmConfig
from verl_slurm.slurm.rank_setup import python_of, setup_script

INIT = Path("/usr/share/modules/init/bash")
real_modules = pytest.mark.skipif(
    not INIT.exists(), reason="NOT RUN: Environment Modules is not installed here"
)


def after(slurm: SlurmConfig, show: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the script and then `show`."""
    whole = setup_script(slurm) + show
    base = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    return subprocess.run(
        ["/bin/bash", "--noprofile", "--norc", "-c", whole],
        env=base | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_commands_run_in_order_and_what_they_export_is_seen() -> None:
    assert setup_script(SlurmConfig()) == ""
    assert python_of(SlurmConfig()) is None
    slurm = SlurmConfig(setup=("export A=1", 'export B="$A 2"', "cd /", "# nothing\n: <<'END'\ntext\nEND"))
    assert after(slurm, 'echo "$A|$B|$PWD"').stdout == "1|1 2|/\n"
    assert after(SlurmConfig(setup=("if true; then",)), "echo went on").stdout == ""


@pytest.mark.parametrize("command", ["false", "exit 7", "no-such-program", "cat /no/such/file"])
def test_a_command_that_fails_ends_the_start_and_is_named(command: str) -> None:
    done = after(SlurmConfig(setup=("true", command)), "echo went on")
    assert done.returncode != 0
    assert done.stdout == ""
    if command != "exit 7":
        assert done.stderr.splitlines()[-1].startswith("verl-slurm: slurm.setup[1] failed with exit code ")


@real_modules
def test_modules_are_loaded_in_order(tmp_path: Path) -> None:
    for name, line in (("one", "setenv ONE 1"), ("two", "setenv TWO $::env(ONE)2")):
        (tmp_path / name).write_text(f"#%Module\n{line}\n")
    done = after(SlurmConfig(modules=("one", "two")), 'echo "$TWO"', MODULEPATH=str(tmp_path))
    assert done.stdout == "12\n", done.stderr


@real_modules
def test_a_module_that_is_not_there_ends_the_start_and_is_named(tmp_path: Path) -> None:
    done = after(SlurmConfig(modules=("cuda/99",)), "echo went on", MODULEPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "verl-slurm: module load cuda/99 failed"


def test_a_module_function_that_the_site_exports_is_used() -> None:
    """As where the login shell exports it: stands for Lmod, which is not installed here."""
    done = after(
        SlurmConfig(modules=("cuda/12.4",)),
        'echo "$LOADED"',
        **{"BASH_FUNC_module%%": '() { export LOADED="$*"; }'},
    )
    assert done.stdout == "load cuda/12.4\n", done.stderr


def test_a_virtual_environment_comes_first(tmp_path: Path) -> None:
    place = tmp_path / "my venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    slurm = SlurmConfig(python=str(place))
    done = after(
        slurm,
        'command -v python; echo "$VIRTUAL_ENV"; python -c "import sys; print(sys.prefix)"',
        PYTHONHOME="/x",
    )
    assert done.stdout.splitlines() == [f"{place}/bin/python", str(place), str(place)]
    assert python_of(slurm) == f"{place}/bin/python"


def test_conda_hooks_of_an_environment_are_run(tmp_path: Path) -> None:
    """The directory stands for one that conda made: it has the folders that tell one, and a hook."""
    place = tmp_path / "rl"
    (place / "conda-meta").mkdir(parents=True)
    hooks = place / "etc/conda/activate.d"
    hooks.mkdir(parents=True)
    (hooks / "cuda.sh").write_text(f"export CUDA_HOME={shlex.quote(str(place))}\nfalse\n")
    done = after(
        SlurmConfig(python=str(place)), 'echo "$CONDA_PREFIX $CONDA_DEFAULT_ENV $CUDA_HOME $VIRTUAL_ENV"'
    )
    assert done.stdout == f"{place} rl {place} \n"
