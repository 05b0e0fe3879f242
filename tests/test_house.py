"""The house rules that no linter knows."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from verl_slurm.base.exit_codes import ExitCode

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "verl_slurm").rglob("*.py"), *(ROOT / "daemon").rglob("*.py")])
MAX_LINES = 500


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_a_file_can_be_held_in_ones_head_and_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES
    tree = ast.parse(text)
    if path.name == "__init__.py" and not tree.body:
        return
    assert ast.get_docstring(tree), "no docstring"
    if path.name not in ("__init__.py", "__main__.py"):
        names = [
            t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
        ]
        assert "__all__" in names, "no __all__"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_what_is_public_has_a_docstring_or_says_it_all_by_its_name(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and len(node.body) > 4:
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_paths_are_renamed_by_files_rename() -> None:
    """ruff bans os.rename and os.replace (pyproject.toml), and does not see methods."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "rename":
                assert ast.unparse(node) == "os.rename", f"{_name(path)}:{node.lineno}: files.rename"


BY_NAME = {
    "demo.py",  # its own run
    "base/mounts.py",  # /proc
    "base/processes.py",  # /proc
    "doctor/fire_drill.py",  # its own directory
    "submit/checks/inputs.py",  # the package's own sources
}
"""What may read files without `bounded`: none of them is another's, or it looks at them in its own way."""


def test_what_others_may_hand_over_is_opened_by_the_helpers_of_bounded() -> None:
    """`Path.open` waits for the writer of a FIFO, and `read_bytes` takes a hole of any size for a file."""
    library = ROOT / "verl_slurm"
    for path in SOURCES:
        if not path.is_relative_to(library) or (name := str(path.relative_to(library))) in BY_NAME:
            continue
        if "/" in name and not name.startswith(
            ("base/", "cli/", "config/", "dataset/prompts/", "runs/", "submit/")
        ):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                words = [word.value for word in node.args if isinstance(word, ast.Constant)]
                opened = node.func.attr == "open" and words[:1] in (["r"], ["rb"])
                assert not opened, f"{name}:{node.lineno}: bounded.open_regular"
                read = node.func.attr in ("read_bytes", "read_text")
                assert not read, f"{name}:{node.lineno}: bounded.read_regular"


def test_the_daemon_loads_nothing_heavy() -> None:
    probe = (
        "import sys, verl_slurm_daemon.lead.loop, verl_slurm_daemon.agent.node; "
        "print(sorted({'torch', 'numpy', 'click', 'submitit', 'rich', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exit_codes_are_unique_and_described() -> None:
    assert len({int(code) for code in ExitCode}) == len(ExitCode)
    assert all(code.description for code in ExitCode)
