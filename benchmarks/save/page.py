"""A run as a page of Markdown. Nothing on it is written by hand: `--page RUN.json`."""

from benchmarks.save.records import Run
from benchmarks.save.report import conditions
from benchmarks.save.tables import Table, tables

_HEAD = """# What a save costs, measured

Made by `python -m benchmarks.save --page RUN.json` from the run in the JSON file beside it; do not edit.

Compare within this page only: the page cache, the balloon and the neighbours of a virtual machine move all
figures together, from run to run, by a factor of three and more. Peers take turns in the same processes, in an
order drawn anew for each repetition. Those that change a process for the others (their classes in
`benchmarks/save/peers/` say how) have processes of their own, with some of the others beside them.
"""


def page(run: Run) -> str:
    """Markdown."""
    what = "\n".join(f"* {line}" for line in [f"`{run.command}`", *conditions(run)])
    return "\n".join([_HEAD, "## Conditions\n", what, "", *map(_markdown, tables(run))])


def _markdown(table: Table) -> str:
    rows = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    note = [table.note, ""] if table.note else []
    return "\n".join([f"## {table.title}", "", *note, *lines, ""])
