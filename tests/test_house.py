"""The house rules that no linter knows."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.house_numbers import budgets, figures, lowered, over_budget
from verl_slurm.base.exit_codes import ExitCode

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "verl_slurm").rglob("*.py"), *(ROOT / "daemon").rglob("*.py")])
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {contract["name"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
BANNED = PYPROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(_tree(path)))


def test_a_file_says_what_it_is_for() -> None:
    bodies = {path: _tree(path).body for path in SOURCES}
    assert [_name(path) for path, body in bodies.items() if body and not ast.get_docstring(_tree(path))] == []


def test_what_is_private_has_an_underscore_and_no_list_of_names_says_so() -> None:
    """`__init__.py` is the exception: it says what a package offers."""
    modules = [path for path in SOURCES if path.name != "__init__.py"]
    assert [_name(path) for path in modules if "__all__" in path.read_text()] == []


def test_what_is_public_has_a_docstring_or_says_it_all_by_its_name() -> None:
    public = [
        (path, node)
        for path in SOURCES
        for node in _tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and len(node.body) > 4
    ]
    assert [f"{_name(path)}: {node.name}" for path, node in public if not ast.get_docstring(node)] == []


def test_paths_are_renamed_by_files_rename() -> None:
    """ruff bans os.rename and os.replace (pyproject.toml), and does not see methods."""
    for path in SOURCES:
        for node in _nodes(path):
            if isinstance(node, ast.Attribute) and node.attr == "rename":
                assert ast.unparse(node) == "os.rename", f"{_name(path)}:{node.lineno}: files.rename"


_COMMAND = re.compile(r"\b(verl-slurm|chmod|mkdir|mv|rm) [a-z0-7+-]+[^`;,:]*$|(?<!\w)(mkdir -p|mv|rm) $")
_QUOTED = re.compile(r"(shell_word|shlex\.quote)\(")


def _unquoted(nodes: Iterable[ast.AST]) -> list[str]:
    """Returns the values that a source prints as words of a command without quoting them."""
    found = []
    for text in (node for node in nodes if isinstance(node, ast.JoinedStr)):
        said = ""
        for part in text.values:
            if isinstance(part, ast.Constant):
                said += part.value
            elif isinstance(part, ast.FormattedValue):
                if _COMMAND.search(said) and not _QUOTED.match(ast.unparse(part.value)):
                    found.append(f"{said}{{{ast.unparse(part.value)}}}")
                said += "WORD"
    return found


def test_a_printed_command_quotes_its_words() -> None:
    """A path may have blanks: what is printed to be copied has to run as it stands."""
    found = [f"{_name(path)}: {said}" for path in SOURCES for said in _unquoted(_nodes(path))]
    assert [said for said in found if "' --cluster local'" not in said] == []


def test_an_unquoted_word_of_a_command_is_found() -> None:
    for line in ('f"`verl-slurm status {run.root}`"', 'f"rm {x}"', 'f"verl-slurm logs --all {x}"'):
        assert len(_unquoted(ast.walk(ast.parse(line)))) == 1, line


BY_NAME = {
    "cli/setup/demo_run.py",  # its own run
    "base/kernel_facts.py",  # /proc and /sys
    "base/packages.py",  # its own metadata
    "base/processes.py",  # /proc
    "checks/fire_drill.py",  # its own directory
    "submit/checks/model_and_reward.py",  # the package's own sources
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
        for node in _nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                words = [word.value for word in node.args if isinstance(word, ast.Constant)]
                opened = node.func.attr == "open" and words[:1] in (["r"], ["rb"])
                assert not opened, f"{name}:{node.lineno}: bounded.open_regular"
                read = node.func.attr in ("read_bytes", "read_text")
                assert not read, f"{name}:{node.lineno}: bounded.read_regular"


def test_the_daemon_loads_nothing_heavy() -> None:
    probe = (
        "import sys, verl_slurm_daemon.lead.lead_loop, verl_slurm_daemon.agent.node; "
        "print(sorted({'torch', 'numpy', 'click', 'submitit', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exit_codes_are_unique_and_described() -> None:
    assert len({int(code) for code in ExitCode}) == len(ExitCode)
    assert all(code.description for code in ExitCode)


_CLAIM = re.compile(
    r"nowhere else|only here|\bhere only|(is|are) the sole|downwards only|this (file|module) imports (only|nothing)"
    r"|the (one|only|sole|single) (place|module|file|function|caller|writer|reader|owner|way|one (that|which|who))\b"
    r"|no other (module|place|function|class|package|caller|code|file)\b|(in|by) (all )?other modules"
    r"|nothing else (imports|reads|writes|removes|calls|knows|uses|opens|prints|may)\b"
    r"|imported (by nothing else|in `[\w./]+` alone)",
    re.IGNORECASE,
)
"""Words that say that one part of the code alone does something."""

ENFORCED = {
    "verl_slurm/cli/show/render.py": "T20",
    "docs/architecture.md": "one way down",
    "verl_slurm/__init__.py": "test_what_python_looks_for_first_imports_what_is_loaded_already",
    "verl_slurm/base/search_path.py": "test_what_python_looks_for_first_imports_what_is_loaded_already",
}
"""File with such a claim -> what enforces it: an entry of ruff's banned-api, a rule of ruff that no other module of the
library is excepted from, a contract of import-linter, or a test of this file.
"""
_ROWS_OF_TESTS = ROOT / "docs/scenarios.md"  # each row names the tests that show it


def _said(path: Path) -> Iterator[str]:
    """Comments and docstrings of a source, or a page, each on one line."""
    text = path.read_text()
    if path.suffix != ".py":
        yield " ".join(text.split())
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or token.string.startswith('"""'):
            yield " ".join(token.string.split())


def _is_enforced(path: Path, rule: str) -> bool:
    lint = PYPROJECT["tool"]["ruff"]["lint"]
    if rule in lint["select"]:
        excepted = {name for name, rules in lint["per-file-ignores"].items() if rule in rules}
        return {name for name in excepted if name.startswith("verl_slurm/")} == {_name(path)}
    return rule in BANNED or rule in CONTRACTS or callable(globals().get(rule))


def test_a_claim_that_one_part_alone_does_something_is_enforced() -> None:
    pages = sorted({*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("verl_slurm/**/*.md")})
    found = {
        _name(path): hit[0]
        for path in [*SOURCES, *pages]
        if path != _ROWS_OF_TESTS
        for said in _said(path)
        if (hit := _CLAIM.search(said))
    }
    assert {name: words for name, words in found.items() if name not in ENFORCED} == {}
    assert sorted(set(ENFORCED) - set(found)) == [], "the claim is gone: remove its line"
    assert [name for name, rule in ENFORCED.items() if not _is_enforced(ROOT / name, rule)] == []


def test_such_a_claim_is_found(tmp_path: Path) -> None:
    for text in (
        "The only way in.",
        "It is written\nnowhere else.",
        "2 MB, and only here",
        "Nothing else removes",
    ):
        (tmp_path / "a.md").write_text(f"{text} anything.")
        (said,) = _said(tmp_path / "a.md")
        assert _CLAIM.search(said), text


def test_what_python_looks_for_first_imports_what_is_loaded_already() -> None:
    loaded = {"verl_slurm/__init__.py": set(), "verl_slurm/base/search_path.py": {"os", "sys"}}
    for name, modules in loaded.items():
        body = _tree(ROOT / name).body
        imports = [node for node in body if isinstance(node, ast.Import)]
        assert {alias.name for node in imports for alias in node.names} == modules
        assert not any(isinstance(node, ast.ImportFrom) for node in body)


def _pure() -> list[Path]:
    """The modules of the contract "decisions touch nothing", and those whose docstring says "Pure."."""
    folders = [
        ROOT / name.replace(".", "/") for name in CONTRACTS["decisions touch nothing"]["source_modules"]
    ]
    folders = [Path(str(f).replace("/verl_slurm_daemon/", "/daemon/verl_slurm_daemon/")) for f in folders]
    assert all(folder.is_dir() or folder.with_suffix(".py").is_file() for folder in folders)
    listed = [p for p in SOURCES if any(p.is_relative_to(f) or p == f.with_suffix(".py") for f in folders)]
    named = [p for p in SOURCES if re.search(r"\bPure\.", ast.get_docstring(_tree(p)) or "")]
    return sorted({*listed, *named})


_CLOCKS = {"now", "utcnow", "today"}
_UNCERTAIN = {"time", "random", "secrets", "uuid", "calendar"}


def _impure(nodes: Iterable[ast.AST]) -> list[str]:
    """Returns the clocks and random numbers that a source reads."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in _CLOCKS:
            owner = ast.unparse(node.value).rpartition(".")[2]
            found += [ast.unparse(node)] if owner in ("datetime", "date") else []
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in _UNCERTAIN]
        elif isinstance(node, ast.ImportFrom) and node.module in _UNCERTAIN:
            found.append(node.module)
    return found


def test_a_pure_module_reads_no_clock_and_draws_no_random_number() -> None:
    pure = _pure()
    assert len(pure) > 45
    assert {_name(path): found for path in pure if (found := _impure(_nodes(path)))} == {}


def test_a_clock_in_a_pure_module_is_found() -> None:
    for line in (
        "import time",
        "from time import monotonic",
        "import random",
        "from datetime import datetime, UTC\ndatetime.now(UTC)",
        "import datetime\ndatetime.date.today()",
    ):
        assert _impure(ast.walk(ast.parse(line))) != [], line


def test_ruff_refuses_each_banned_name_in_a_module_of_the_library() -> None:
    modules = {word: word.rpartition(".") for word in BANNED}
    source = "".join(
        f"from {module} import {name}\n" if module else f"import {word}\n"
        for word, (module, _, name) in modules.items()
    )
    place = ["--stdin-filename", str(ROOT / "verl_slurm/config/planted.py")]
    ruff = [sys.executable, "-m", "ruff", "check", "--select", "TID251", *place, "-"]
    done = subprocess.run(ruff, input=source, capture_output=True, text=True, cwd=ROOT, check=False)
    assert [word for word in BANNED if f"`{word}` is banned" not in done.stdout] == []


def test_import_linter_refuses_a_clock_in_a_folder_of_decisions(tmp_path: Path) -> None:
    """Of our packages two folders and nothing else: it is the shape of the contract that is asked about."""
    folders = ("verl_slurm.checkpoint.decide", "verl_slurm_daemon.decide")
    words = ("time", "random", "subprocess")
    for folder in folders:
        place = tmp_path / folder.replace(".", "/")
        place.mkdir(parents=True)
        for above in (place, *place.parents[: folder.count(".")]):
            (above / "__init__.py").touch()
        (place / "planted.py").write_text("".join(f"import {word}\n" for word in words))
    assert set(folders) <= set(CONTRACTS["decisions touch nothing"]["source_modules"])
    contract = CONTRACTS["decisions touch nothing"] | {"source_modules": list(folders)}
    contract["forbidden_modules"] = [name for name in contract["forbidden_modules"] if "." not in name]
    rows = "".join(f"{key} = {json.dumps(value)}\n" for key, value in contract.items())
    (tmp_path / "pyproject.toml").write_text(
        '[tool.importlinter]\nroot_packages = ["verl_slurm", "verl_slurm_daemon"]\n'
        f"include_external_packages = true\n[[tool.importlinter.contracts]]\n{rows}"
    )
    linter = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    argv = [sys.executable, "-c", linter, "--no-cache"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode != 0
    for folder in folders:
        assert [w for w in words if f"{folder} is not allowed to import {w}" not in done.stdout] == []


def test_a_bound_is_written_as_the_number_that_it_bounds() -> None:
    """`typing` keeps one object for equal `Annotated[...]`: `ge=0` of a float shows as the first import wrote it."""
    found = []
    for path in SOURCES:
        for node in _nodes(path):
            if isinstance(node, ast.Subscript) and ast.unparse(node).startswith("Annotated[float,"):
                bounds = [
                    word for call in ast.walk(node) if isinstance(call, ast.Call) for word in call.keywords
                ]
                found += [
                    f"{_name(path)}:{node.lineno}"
                    for bound in bounds
                    if isinstance(bound.value, ast.Constant) and type(bound.value.value) is int
                ]
    assert found == []


def test_no_figure_of_the_code_is_over_its_budget() -> None:
    """A budget rises in a commit that says what was removed for it (`tests/house_numbers.py`)."""
    assert over_budget(figures(), budgets()) == []


def test_a_budget_falls_with_its_figure_and_never_rises() -> None:
    budget = '# why\n[at_most]\nlines = 9 # 4\n[at_least]\nshare = 0.5\n[code]\n"a/b" = 7\n"gone" = 3\n'
    assert lowered(budget, {"at_most": {"lines": 8}, "at_least": {"share": 0.6}, "code": {"a/b": 9}}) == (
        '# why\n[at_most]\nlines = 8 # 4\n[at_least]\nshare = 0.6\n[code]\n"a/b" = 7\n'
    )


def test_a_figure_beyond_its_budget_and_one_without_a_budget_are_named() -> None:
    found = {"at_most": {"lines": 8.0}, "at_least": {"share": 0.4}, "code": {"new": 1.0, "a": 2.0}}
    allowed = {"at_most": {"lines": 7.0}, "at_least": {"share": 0.5}, "code": {"a": 2.0}}
    assert over_budget(found, allowed) == [
        "lines = 8: at most 7",
        "share = 0.4: at least 0.5",
        "new = 1: at most 0",
    ]
