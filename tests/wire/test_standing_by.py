"""What a program has imported is remembered, and only what is installed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import new_run
from tests.processes import python_path
from verl_slurm.base.paths import RunPaths
from verl_slurm.wire.standing_by import WatchedEnvironment, import_all, remember_imports


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
from verl_slurm.wire.standing_by import remember_imports
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
    assert "verl_slurm.wire.standing_by" in names
    assert not {"own", "strange", "__main__", "sys"} & set(names)


def test_what_cannot_be_imported_is_passed_over(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    paths.imports.write_text("no_such_module\nos; print()\n../x\n\nwave\n")
    import_all(paths.imports)
    assert "wave" in sys.modules


def test_a_directory_that_takes_no_file_is_no_error(tmp_path: Path) -> None:
    remember_imports(RunPaths(tmp_path / "no such run"))


def _search() -> None:
    """Reads variables in turn until it finds one."""
    for value in os.environ.values():
        if value == "found":
            break


@pytest.mark.parametrize(
    ("read", "counts"),
    [
        (lambda: os.environ.get("PLACE"), True),
        (lambda: "PLACE" in os.environ, True),
        (_search, True),
        (lambda: (list(os.environ), os.environ["PLACE"]), True),
        # As tqdm and fsspec look for their own.
        (lambda: [value for name, value in os.environ.items() if name.startswith("TQDM_")], False),
        (lambda: dict(os.environ), False),
        (lambda: list(os.environ), False),
        (lambda: (dict(os.environ), os.environ.get("PLACE")), True),
    ],
)
def test_a_variable_counts_as_read_by_its_name_and_not_in_turn_with_all_others(
    read: Callable[[], object], counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "1")
    monkeypatch.setenv("ANOTHER", "found")
    monkeypatch.setenv("LAST", "")
    watched = WatchedEnvironment()
    with watched:
        read()
    assert watched.differing({**os.environ, "PLACE": "2"}) == (["PLACE"] if counts else [])
    assert watched.differing(dict(os.environ)) == []


def test_tqdm_and_fsspec_may_be_imported_ahead_for_a_rank_of_any_number() -> None:
    """Found with a spare node: its rank has the number of the lost one, and was made anew each time."""
    program = (
        "import os\nfrom verl_slurm.wire.standing_by import WatchedEnvironment\nwith WatchedEnvironment() as watched:\n"
        "    import tqdm, fsspec.config\nprint(watched.differing({**os.environ, 'RANK': '1'}))"
    )
    environ = {**os.environ, **python_path(), "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr
