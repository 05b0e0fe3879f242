"""Which long lanes a change starts, and on which commit each lane last passed whole.

`python -m tests.lanes due` prints the lanes that CI has to run: `.ci/lanes.toml` maps paths to lanes, and a lane's
changes are those since its commit in `.ci/passed.toml`. `python -m tests.lanes passed LANE COMMIT` writes the latter:
`make test-all` calls it after each lane that passed.
"""

import fcntl
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TABLE = ROOT / ".ci" / "lanes.toml"
PASSED = ROOT / ".ci" / "passed.toml"


def has_variants() -> bool:
    """Returns whether variants run: everywhere but in the lanes that CI starts, where make sets the variable."""
    return os.environ.get("VERL_SLURM_VARIANTS") != "0"


def with_variants(*cases: Any, keep: int = 1) -> list[Any]:
    """The cases of one claim, for `parametrize`: CI runs the first `keep`, `make test-all` all of them. A tuple has the
    values of several parameters."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [*cases[:keep], *(pytest.param(*row, marks=pytest.mark.variant) for row in rows[keep:])]


@dataclass(frozen=True)
class Table:
    """`.ci/lanes.toml`: path prefixes that start every lane, and the lanes that other prefixes start."""

    every: list[str]
    starts: dict[str, list[str]]

    @property
    def lanes(self) -> set[str]:
        return {lane for row in self.starts.values() for lane in row}

    def started_by(self, path: str) -> set[str]:
        """The lanes of the longest prefix of `path`; all lanes where no row fits."""
        rows = [prefix for prefix in [*self.every, *self.starts] if path.startswith(prefix)]
        longest = max(rows, key=len, default="")
        return set(self.starts[longest]) if longest in self.starts else self.lanes


def read_table() -> Table:
    return Table(**tomllib.loads(TABLE.read_text()))


def due_lanes(table: Table, changed: Mapping[str, list[str] | None]) -> list[str]:
    """The lanes to run. `changed` gives the paths that differ from each lane's last whole pass; None: never passed."""

    def is_due(lane: str) -> bool:
        paths = changed.get(lane)
        return paths is None or any(lane in table.started_by(path) for path in paths)

    return sorted(filter(is_due, table.lanes))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _changed_since(commit: str) -> list[str] | None:
    """Paths that differ between `commit` and the tree; None where this clone does not know the commit."""
    try:
        return _git(
            "diff", "--name-only", "--no-renames", commit, "--", ".", ":!.ci/passed.toml"
        ).splitlines()
    except subprocess.CalledProcessError:
        return None


def record_pass(lane: str, commit: str) -> None:
    """Writes that `lane` passed whole on `commit`. Lanes end beside each other, so the file is locked.

    Raises:
        SystemExit: the tree is no longer that commit's, so the pass says nothing about it.
    """
    if _changed_since(commit) != []:
        sys.exit(f"{lane}: passed, not recorded: the tree differs from commit {commit}")
    with PASSED.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        head = [line for line in text.splitlines() if line.startswith("#")]
        rows = tomllib.loads(text) | {lane: commit}
        file.seek(0)
        file.truncate()
        file.write("\n".join([*head, *(f'{name} = "{rows[name]}"' for name in sorted(rows))]) + "\n")


def main(words: list[str]) -> None:
    match words:
        case ["due"]:
            passed = tomllib.loads(PASSED.read_text())
            print(*due_lanes(read_table(), {lane: _changed_since(commit) for lane, commit in passed.items()}))
        case ["passed", lane, commit]:
            record_pass(lane, commit)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
