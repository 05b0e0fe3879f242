"""What a Python is asked: its packages, and where it looks for modules."""

import os
import sys
from pathlib import Path

import pytest

from verl_slurm.base.search_path import PYTHONPATH
from verl_slurm.program.installed import Installed, look

pytestmark = pytest.mark.slow  # starts Python

# As setuptools finds the packages of an editable install; and a site that greets.
CUSTOMIZE = """
import sys, types
finder = types.ModuleType("__editable___mine_0_1_finder")
finder.MAPPING = {"mine": "/me/repo/src/mine"}
sys.modules[finder.__name__] = finder
print("welcome to the cluster")
"""


def test_packages_are_told_by_their_names_and_the_first_on_the_path_counts(tmp_path: Path) -> None:
    for place, version in (("first", "1.2"), ("second", "3")):
        (tmp_path / place / f"My_Package-{version}.dist-info").mkdir(parents=True)
    (tmp_path / "second/other-0.1-py3.11.egg-info").mkdir()
    (tmp_path / "first/sitecustomize.py").write_text(CUSTOMIZE)
    # In front of the inherited one, by which this environment's packages may be found.
    places = [f"{tmp_path}/{name}" for name in ("first", "second", "none")]
    inherited = os.environ.get(PYTHONPATH)
    environ = dict(os.environ) | {PYTHONPATH: ":".join([*places, *([inherited] if inherited else [])])}
    found = look(sys.executable, environ)
    assert (found.packages["my-package"], found.packages["other"]) == ("1.2", "0.1")
    assert found.packages["msgspec"]
    assert found.search[:2] == (f"{tmp_path}/first", f"{tmp_path}/second")
    assert f"{tmp_path}/none" not in found.search
    assert found.search[-1] == "/me/repo/src"
    assert found.python == sys.version.split()[0]


@pytest.mark.parametrize("program", ["/bin/false", "/bin/true", "/no/such/python"])
def test_a_python_that_does_not_answer_gives_an_empty_answer(program: str) -> None:
    assert look(program) == Installed()
