"""The table of all runs below a directory, kept up to date: one small row for each, and which rows have changed.

The directory is followed as `verl-slurm watch` does it. A run's facts are gathered when its page is opened.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import msgspec

from verl_slurm.base.one_line import counted, printable, span
from verl_slurm.config.load import is_run
from verl_slurm.journal.events import Event
from verl_slurm.runs.follow import FleetWatch, Followed
from verl_slurm.runs.glance import Glance, glance

# Characters of an event in the table.
_LONGEST = 1000


class RunRow(msgspec.Struct, frozen=True):
    """One run, as it is shown."""

    run: str
    """Its path below the directory."""
    link: str
    """Empty: it has no page, because it is closed to us."""
    state: str
    tone: str = ""
    """done or failed: the colour of the state."""
    step: str = "–"
    reward: str = "–"
    interrupted: str = "–"
    last: str = "–"
    """The newest event, in words."""
    time: str = "–"
    """Of that event, in UTC."""


def row_of(name: str, state: str, seen: Glance | None, tell: Callable[[Event], str]) -> RunRow:
    """Returns the row of a run. Pure. `seen` None: nothing but its state is known.

    `name`: the run's path below the directory; of bytes that are no UTF-8, as `os.fsdecode` has them.
    """
    # Names are of any bytes, and JSON has no lone surrogates.
    shown = printable(name)
    if seen is None:
        link = "" if state == "no permission" else _link(name)
        return RunRow(run=shown, link=link, state=state, tone="failed" if state == "no permission" else "")
    steps = seen.status.get("steps")
    failed = state.startswith("failed") or state in ("gone", "removed")
    at = None if seen.last is None else seen.last.at
    return RunRow(
        run=shown,
        link=_link(name),
        state=printable(state),
        tone="failed" if failed else "done" if state == "done" else "",
        step=printable(f"{seen.step} of {steps}" if steps else f"{seen.step}"),
        reward="–" if seen.reward is None else f"{seen.reward:.4g}",
        interrupted=f"{seen.interruptions}, {span(seen.interrupted_s)}" if seen.interruptions else "–",
        last="–" if seen.last is None else printable(tell(seen.last))[:_LONGEST],
        time="–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
    )


def _link(name: str) -> str:
    return "run/" + quote(os.fsencode(name))


class LiveRuns:
    """Rows by the run's path below `above`, with links resolved; a run that a link has outside of it is left out.

    `look` reads files, one at a time; it may be called in a thread, since only `apply` and `drop` change what is
    shown.
    """

    def __init__(self, place: Path, tell: Callable[[Event], str]) -> None:
        self.place = place.resolve()
        # A run by itself has a name, too.
        self.above = self.place.parent if is_run(self.place) else self.place
        self.rows: dict[str, RunRow] = {}
        self.version = 0
        """Grows with each `apply` that brings news."""
        self._versions: dict[str, int] = {}
        self._tell = tell
        self._made: dict[str, RunRow] = {}
        self._dirty: set[Path] = set()
        self._dropped: set[Path] = set()
        self._trouble = self._told = ""
        self._fleet = FleetWatch([self.place], lambda run, _: self._dirty.add(run.root), self._on_glance)
        self.look_s = self._fleet.look_s
        """Seconds between looks."""

    @property
    def problem(self) -> str:
        """Why the scheduler did not answer, or files could not be read."""
        return self._trouble or self._fleet.problem

    def look(self, *, ask: bool = False) -> None:
        """Reads what has changed; with `ask` also, once a minute, whether runs that have not ended live."""
        self._dirty.clear()
        self._forget()
        try:
            self._fleet.look(ask=ask)
            self._trouble = ""
        except OSError as error:  # of one run, which must not end what is shown of the others
            self._trouble = str(error)
        for root in self._dirty:
            if (run := self._fleet.runs.get(root)) is not None:
                self._on_glance(run, glance(root))
        for root, state in self._fleet.idle.items():
            self._make(root, state, None)

    def apply(self) -> bool:
        """Takes over what was read; returns whether it is news."""
        made, self._made = self._made, {}
        changed = [name for name, row in made.items() if self.rows.get(name) != row]
        is_news = bool(changed) or self.problem != self._told
        self.version += is_news
        for name in changed:
            self.rows[name], self._versions[name] = made[name], self.version
        self._told = self.problem
        return is_news

    def removed(self) -> list[str]:
        """Returns the runs whose directories are gone."""
        # No journal says so.
        return [name for name in list(self.rows) if not os.path.lexists(self.above / name)]

    def drop(self, names: Sequence[str]) -> None:
        """Forgets these runs."""
        for name in names:
            self.rows.pop(name, None)
            self._versions.pop(name, None)
            self._dropped.add(self.above / name)

    def changed_since(self, version: int, only: str | None = None) -> list[RunRow]:
        """Returns the rows that are newer, in the order of the names; `only`: of this run alone."""
        names = self.rows if only is None else {only} & self.rows.keys()
        return [self.rows[name] for name in sorted(names) if self._versions[name] > version]

    def known(self, name: str) -> tuple[str, bool | None]:
        """Returns the state of a run, and whether its job lives as far as is known."""
        run = self._fleet.runs.get(self.above / name)
        return (self.rows[name].state, None) if run is None else (run.state, run.alive)

    @property
    def summary(self) -> str:
        """`12 runs: 9 done, 3 running`, and why the scheduler did not answer."""
        states = Counter(row.state for row in self.rows.values()).most_common()
        words = ", ".join(f"{count} {state}" for state, count in states)
        told = f"{counted(len(self.rows), 'run')}{': ' if words else ''}{words}"
        return f"{told}. {printable(self.problem)}" if self.problem else told

    def _on_glance(self, run: Followed, seen: Glance) -> None:
        self._make(run.root, run.state, seen)

    def _make(self, root: Path, state: str, seen: Glance | None) -> None:
        if root.is_relative_to(self.place) and root != self.above:
            name = str(root.relative_to(self.above))
            self._made[name] = row_of(name, state, seen, self._tell)

    def _forget(self) -> None:
        while self._dropped:
            root = self._dropped.pop()
            self._fleet.runs.pop(root, None)
            self._fleet.idle.pop(root, None)
