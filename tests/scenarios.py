"""What a run has to survive, and the tests that show it: `python -m tests.scenarios` writes docs/scenarios.md.

A test names its rows by `@pytest.mark.scenario("P01", ...)`, tests/scenarios.toml says what each row demands. The marks
are read from the source, so that a test whose tools are missing on this machine is listed all the same.

Called by: tests/test_scenarios.py; by hand after a change.
"""

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "scenarios.md"

_HEAD = """# What a run survives, and the test that shows it

For readers who ask whether a run survives a certain fault: what happens → what must hold, and the tests that show it.

The tests use real processes, files and sockets, or a real Slurm. `pytest FILE -k NAME` runs one. Seeds are fixed, and
printed when a test fails. Tests after "Slurm:" need the embedded cluster. Those after "soak:" take minutes to hours
(`make soak`). `python -m tests.scenarios` writes this page.
"""


class Shown(NamedTuple):
    """One test that shows a row."""

    file: str
    name: str
    marks: frozenset[str]

    @property
    def lane(self) -> str:
        return "soak" if "soak" in self.marks else "Slurm" if "slurm" in self.marks else "all"


def read_rows() -> dict[str, dict[str, str]]:
    """Part → id → what happens and what must hold."""
    return tomllib.loads((TESTS / "scenarios.toml").read_text())


def _marks(nodes: list[ast.expr]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """`pytest.mark.NAME` and `pytest.mark.NAME(...)`: the name, with those of its arguments that are texts."""
    for node in nodes:
        call = node if isinstance(node, ast.Call) else None
        mark = call.func if call else node
        if isinstance(mark, ast.Attribute) and ast.unparse(mark.value) == "pytest.mark":
            words = call.args if call else []
            yield (
                mark.attr,
                tuple(w.value for w in words if isinstance(w, ast.Constant) and isinstance(w.value, str)),
            )


def _of_module(tree: ast.Module) -> list[ast.expr]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            return node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
    return []


def shown() -> dict[str, list[Shown]]:
    """Id → its tests, in the order of their files."""
    found: dict[str, list[Shown]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "mark.scenario" not in text:
            continue
        tree = ast.parse(text)
        everywhere = list(_marks(_of_module(tree)))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                marks = everywhere + list(_marks(node.decorator_list))
                test = Shown(
                    str(path.relative_to(TESTS.parent)), node.name, frozenset(name for name, _ in marks)
                )
                for row in [word for name, words in marks if name == "scenario" for word in words]:
                    found[row].append(test)
    return dict(found)


def page() -> str:
    """docs/scenarios.md, whole."""
    tests, lines = shown(), [_HEAD]
    for part, rows in read_rows().items():
        lines.append(f"## {part}\n")
        for row, what in rows.items():
            named: dict[tuple[str, str], list[str]] = defaultdict(list)
            for test in tests.get(row, []):
                lane = "" if test.lane == "all" else f"{test.lane}: "
                named[lane, test.file].append(test.name.removeprefix("test_"))
            by = [f"{lane}`{file}: {', '.join(names)}`" for (lane, file), names in sorted(named.items())]
            for piece in "<br>\n  ".join([f"* {row}: {what}", *by]).splitlines():
                lines += wrap(piece, 120, subsequent_indent="  ", break_on_hyphens=False)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
