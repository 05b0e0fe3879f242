"""`python -m tests.house_numbers`: how large and how entangled the code is, each figure beside its budget.

A budget (`house_budget.toml`) may fall with its figure: `python -m tests.house_numbers lower` writes that. It rises by
hand, in a commit that says what was removed for it. `make check` fails where a figure is over its budget
(`test_house.py`). Of figures that should be high, `least` is the budget.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import click
import grimp

from verl_slurm.cli.main import cli
from verl_slurm.config.explain import all_keys

ROOT = Path(__file__).parent.parent
BUDGET = Path(__file__).parent / "house_budget.toml"
PACKAGES = {"verl_slurm": ROOT / "verl_slurm", "verl_slurm_daemon": ROOT / "daemon" / "verl_slurm_daemon"}
# Programs and templates that are installed or run beside the Python code; generated and foreign files are not ours.
OTHER_CODE = (
    "verl_slurm/**/*.js",
    "verl_slurm/**/*.css",
    "verl_slurm/**/*.jinja",
    "sbatch/*.sbatch",
    ".ci/run",
)
FOREIGN = {"echarts.min.js"}
_TEST = re.compile(r"^ *(?:async )?def test_", re.MULTILINE)
_Figures = dict[str, float]


@cache
def _source(path: Path) -> str:
    return path.read_text()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_source(path))


@cache
def lines_of(path: Path) -> tuple[int, int, int]:
    """(code, docstring, comment) lines of a module; a bare string counts as a docstring."""
    documented = {
        line
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    comments, code = set(), set()
    quiet = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(_source(path)).readline):
        span = set(range(token.start[0], token.end[0] + 1)) - documented
        if token.type == tokenize.COMMENT:
            comments |= span
        elif token.type not in quiet:
            code |= span
    return len(code), len(documented), len(comments)


def _code_lines(paths: Iterable[Path]) -> int:
    return sum(lines_of(path)[0] for path in paths)


def _functions(paths: Iterable[Path]) -> Iterator[tuple[int, str]]:
    """(lines from `def` to the end, name) of each function."""
    for path in paths:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{path.stem}.{node.name}"


def _commands(group: click.Command) -> Iterator[click.Command]:
    if not isinstance(group, click.Group):
        yield group
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if not command.hidden:
            yield from _commands(command)


def _repeated(names: Iterable[str]) -> int:
    """How many of the names occur more than once."""
    return sum(number > 1 for number in Counter(names).values())


def figures() -> dict[str, _Figures]:
    """Returns the figures of `[at_most]` and `[at_least]`, and the lines of code of each package, `[code]`."""
    paths = [path for place in PACKAGES.values() for path in sorted(place.rglob("*.py"))]
    modules = [path for path in paths if path.name not in ("__init__.py", "__main__.py")]
    tests = sorted((ROOT / "tests").rglob("*.py"))
    code, documented, comments = (sum(column) for column in zip(*map(lines_of, paths), strict=True))
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    importers = Counter(
        len(graph.find_modules_that_directly_import(name))
        for name in graph.modules
        if not graph.find_children(name)
    )
    others = [path for glob in OTHER_CODE for path in ROOT.glob(glob) if path.name not in FOREIGN]
    lengths = [lines for lines, _ in _functions(paths)]
    at_most: _Figures = {
        "lines": sum(len(_source(path).splitlines()) for path in paths),
        "code_lines": code,
        "other_code_lines": sum(len(path.read_text().splitlines()) for path in others),
        "test_lines": sum(len(_source(path).splitlines()) for path in tests),
        # By their text: to parse the tests would take as long as all the rest.
        "test_functions": sum(len(_TEST.findall(_source(path))) for path in tests),
        "top_level_packages_and_modules": len(
            {name.split(".")[1] for name in graph.modules if name.startswith("verl_slurm.")}
        ),
        "modules_in_fullest_folder": max(Counter(path.parent for path in modules).values()),
        "modules_with_one_importer": importers[1],
        "modules_under_60_lines": sum(len(_source(path).splitlines()) < 60 for path in modules),
        "file_names_used_twice": _repeated(path.name for path in modules),
        "public_classes_with_one_name": _repeated(
            node.name
            for path in paths
            for node in _tree(path).body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ),
        "longest_function": max(lengths),
        "functions_over_70_lines": sum(lines > 70 for lines in lengths),
        "docstring_lines_per_code_line": round(documented / code, 3),
        "configuration_keys": len(all_keys()),
        "commands": sum(1 for _ in _commands(cli)),
    }
    code_of: _Figures = {
        f"{package.name}/{folder.name}" if folder != package else package.name: _code_lines(
            folder.glob("*.py") if folder == package else folder.rglob("*.py")
        )
        for package in PACKAGES.values()
        for folder in (package, *sorted(path for path in package.iterdir() if any(path.rglob("*.py"))))
    }
    return {
        "at_most": at_most,
        "at_least": {"comment_lines_per_code_line": round(comments / code, 3)},
        "code": code_of,
    }


def budgets() -> dict[str, _Figures]:
    return tomllib.loads(BUDGET.read_text())


def over_budget(found: dict[str, _Figures], allowed: dict[str, _Figures]) -> list[str]:
    """Returns a line for each figure that its budget does not allow, and for each that has none."""
    return [
        f"{name} = {value:g}: {'at least' if kind == 'at_least' else 'at most'} {allowed[kind].get(name, 0):g}"
        for kind, rows in found.items()
        for name, value in rows.items()
        if (value < allowed[kind][name] if kind == "at_least" else value > allowed[kind].get(name, 0))
    ]


def lowered(text: str, found: dict[str, _Figures]) -> str:
    """Returns the budget's text with each budget that is above its figure set to it, and without figures that went."""
    kind, lines = "", []
    for line in text.splitlines(keepends=True):
        if section := re.match(r"\[(\w+)\]", line):
            kind = section[1]
        if not (row := re.match(r'("?([\w/]+)"? = )([\d.]+)(.*\n)', line)):
            lines.append(line)
        elif row[2] in found[kind]:
            better = max if kind == "at_least" else min
            lines.append(f"{row[1]}{better(float(row[3]), found[kind][row[2]]):g}{row[4]}")
    return "".join(lines)


def main(words: list[str]) -> int:
    found, allowed = figures(), budgets()
    if words == ["lower"]:
        BUDGET.write_text(lowered(BUDGET.read_text(), found))
        return 0
    for kind, rows in found.items():
        for name, value in rows.items():
            sys.stdout.write(f"{name:<40}{value:>8g}  budget {allowed.get(kind, {}).get(name, 0):g}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
