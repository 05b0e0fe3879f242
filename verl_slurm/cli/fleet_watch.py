"""`verl-slurm watch` of many runs: prints each event as a line with its run, and how many runs are in which state."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_slurm.base.errors import NotFound
from verl_slurm.base.one_line import counted
from verl_slurm.cli import render, story
from verl_slurm.journal.events import Event
from verl_slurm.journal.files import to_json

if TYPE_CHECKING:
    from verl_slurm.runs.follow_many import Followed

__all__ = ["watch_fleet"]

_LONGEST = 24
"""Characters of a run's name in front of its events."""


def watch_fleet(places: Sequence[Path], *, as_json: bool) -> int:
    """Prints the events of the runs in and below `places` until none lives; returns 0, or the highest exit code of a
    run.

    Raises:
        NotFound: there are no runs.
    """
    from verl_slurm.runs.follow_many import FleetWatch

    bottom = render.Progress()
    tellers: dict[Path, story.Story] = {}
    turns = 0

    def on_event(run: "Followed", event: Event) -> None:
        if as_json:
            render.json_value({"run_dir": str(run.root), **to_json(event)})
            return
        text = tellers.setdefault(run.root, story.Story()).tell(event)
        if text is not None:
            name = run.root.name
            short = name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
            bottom.line(f"{short:<{_LONGEST}}  {text}")

    def on_turn() -> None:
        nonlocal turns
        counts = Counter(run.state for run in fleet.runs.values())
        if as_json and not turns:
            render.json_value({"event": "watching", "runs": len(fleet.runs), "states": counts})
        elif not as_json and (not turns or bottom.is_live):
            words = ", ".join(f"{count} {state}" for state, count in counts.most_common())
            bottom.show(turns, f"{counted(len(fleet.runs), 'run')}: {words or 'none'}")
        if not turns and fleet.problem:
            render.warning(fleet.problem)
        turns += 1

    fleet = FleetWatch(places, on_event)
    try:
        code = fleet.follow(on_turn)
    finally:
        bottom.close()
    if not fleet.runs:
        raise NotFound(
            "no run that was ever submitted",
            where=", ".join(map(str, places)),
            remedy="give run directories, or the directory that holds them",
        )
    return int(code)
