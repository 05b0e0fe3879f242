"""`python -m tests.house_numbers [ROOT]`: how large and how entangled the code is, as docs/decisions/0014 lists it."""

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from pathlib import Path

import grimp

PACKAGES = {"verl_slurm": "verl_slurm", "verl_slurm_daemon": "daemon/verl_slurm_daemon"}


def lines_of(path: Path) -> tuple[int, int, int]:
    """(code, docstring, comment) lines of a module; a bare string counts as a docstring."""
    source = path.read_text()
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    comments, code = set(), set()
    quiet = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        span = set(range(token.start[0], token.end[0] + 1)) - documented
        if token.type == tokenize.COMMENT:
            comments |= span
        elif token.type not in quiet:
            code |= span
    return len(code), len(documented), len(comments)


def main(root: Path) -> None:
    paths = [path for place in PACKAGES.values() for path in sorted((root / place).rglob("*.py"))]
    modules = [path for path in paths if path.name != "__init__.py"]
    counted = [lines_of(path) for path in paths]
    code, documented, comments = (sum(column) for column in zip(*counted, strict=True))
    lengths = [path.read_text().count("\n") for path in modules]
    sys.path[:0] = [str(root), str(root / "daemon")]
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    importers = Counter(
        len(graph.find_modules_that_directly_import(name))
        for name in graph.modules
        if not graph.find_children(name)
    )
    tops = {name.split(".")[1] for name in graph.modules if name.startswith("verl_slurm.")}
    flat = Counter(path.parent for path in modules)
    rows = {
        "lines": sum(path.read_text().count("\n") for path in paths),
        "code lines": code,
        "docstring / code": round(documented / code, 3),
        "comment / code": round(comments / code, 3),
        "top-level packages and modules of the library": len(tops),
        "modules": len(modules),
        "median lines of a module": statistics.median(lengths),
        "modules under 60 lines": sum(length < 60 for length in lengths),
        "modules over 500 lines": sum(length > 500 for length in lengths),
        "modules with one importer": importers[1],
        "modules in the fullest folder": max(flat.values()),
    }
    for name, value in rows.items():
        sys.stdout.write(f"{name:<48}{value}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
