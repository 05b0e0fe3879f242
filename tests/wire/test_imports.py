"""What a program has imported is remembered, and only what is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import new_run
from tests.processes import python_path
from verl_slurm.base.paths import RunPaths
from verl_slurm.wire.imports import import_all, remember_imports


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = new_run(tmp_path / "run")
    found.control.mkdir(mode=0o700, exist_ok=True)
    return found


PROGRAM = """
import sys
from pathlib import Path
import own, msgspec.json, wave, cmd
from verl_slurm.base.paths import RunPaths
from verl_slurm.wire.imports import remember_imports
sys.modules["strange"] = 3
remember_imports(RunPaths(Path(sys.argv[1])))
"""


def test_installed_modules_are_remembered_in_their_order_and_the_programs_own_are_not(
    paths: RunPaths, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("")
    argv = [sys.executable, "-c", PROGRAM, str(paths.root)]
    subprocess.run(argv, env=python_path(tmp_path), check=True, timeout=60)
    names = paths.imports.read_text().splitlines()
    assert names.index("msgspec.json") < names.index("wave") < names.index("cmd")
    assert "verl_slurm.wire.imports" in names
    assert not {"own", "strange", "__main__", "sys"} & set(names)


def test_what_cannot_be_imported_is_passed_over(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    paths.imports.write_text("no_such_module\nos; print()\n../x\n\nwave\n")
    import_all(paths.imports)
    assert "wave" in sys.modules


def test_a_directory_that_takes_no_file_is_no_error(tmp_path: Path) -> None:
    remember_imports(RunPaths(tmp_path / "no such run"))
