"""`verl-slurm watch`: prints the events of one run, or of many, as they come."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from verl_slurm.base.errors import NotFound
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.command_options import PLACE, command
from verl_slurm.cli.show import render, story
from verl_slurm.cli.show.run_tables import curve_of, live_line
from verl_slurm.config.load import is_run
from verl_slurm.journal.events import Event
from verl_slurm.journal.files import to_json
from verl_slurm.journal.history import History
from verl_slurm.journal.pace import LOOKED_AT, node_states, pace_of
from verl_slurm.journal.steps import last_steps
from verl_slurm.runs.follow import FleetWatch, Followed, follow_run
from verl_slurm.runs.glance import find_runs
from verl_slurm.runs.run_record import last_job, require_run


def tell_until_end(paths: RunPaths, offset: int, *, as_json: bool, verbose: bool = False) -> int:
    """Tells a run's story from byte `offset` of its journal until it ends; returns its exit code."""
    if as_json:
        # As they are in the journal, repetitions included: a story is for people.
        return follow_run(paths, offset, lambda event: render.json_value(to_json(event)))
    bottom = render.BottomLine()
    teller = story.Story(verbose=verbose)
    gauge = _Gauge(paths)

    def on_event(event: Event) -> None:
        gauge.history.feed(event)
        if (text := teller.tell(event)) is not None:
            bottom.line(text)

    def on_status(status: dict[str, Any]) -> None:
        if status.get("state") in ("running", "saving", "checking"):
            bottom.show(int(status.get("step", 0)), gauge.line(status))

    try:
        return follow_run(paths, offset, on_event, on_status)
    except KeyboardInterrupt:
        bottom.close()
        render.warning(
            f"no longer following; the run goes on. Again: verl-slurm watch {shell_word(paths.root)}"
        )
        raise
    finally:
        # The line is ended in any case, before another error prints below it.
        bottom.close()


class _Gauge:
    """Says in one line how far a followed run is."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._step = -1
        self._rows: list[dict[str, Any]] = []
        self.history = History()

    def line(self, status: dict[str, Any]) -> str:
        step = int(status.get("step", 0))
        if step != self._step:
            # When another step is done, and not at each look.
            self._step, self._rows = step, last_steps(self._paths, LOOKED_AT)
        return live_line(
            story.progress(status),
            pace_of(self._rows, step, status.get("steps")),
            curve_of(self._rows),
            node_states(status, self.history.lost_nodes, (), has_nodes=True),
            render.width() if render.draws() else 0,
        )


@command("NOT_FOUND", note="\n\nOtherwise the exit code with which the run ended.")
@click.argument("places", metavar="RUN...", type=PLACE, nargs=-1, required=True)
@click.option("-v", "--verbose", is_flag=True, help="With Slurm's own words as evidence of each cause.")
def watch(places: tuple[Path, ...], verbose: bool, as_json: bool) -> int:
    """Follow RUN from its first event until it ends, over all its requeues.

    Prints what the daemon wrote down (starts, causes, saves, verdicts, requeues), then each event as it happens
    and the step it is at. On a terminal the last line has a bar of the steps, the time that is left at the pace of
    the last ones, the nodes that do something else than training, and the curve of the reward.

    Of a run that was submitted again after an end, the newest job decides when the run has ended, and with which
    code. Ctrl-C ends the watching, not the run. With --json each event is one line.

    With several runs, or a directory that holds some, each event from now on is told with its run's name, until none
    lives any more; runs that come into the directory meanwhile are followed, too. The exit code is then 0, or the
    highest one with which a run ended meanwhile.
    """
    roots = [place.resolve() for place in places]
    for root in roots:
        # Before anything is followed: a mistyped name would otherwise count as a directory without runs.
        if not root.exists():
            remedy = "`verl-slurm list DIR` shows the runs below DIR"
            raise NotFound("no such run or directory", where=root, remedy=remedy)
    single = len(roots) == 1 and not _holds_runs(roots[0])
    if not single:
        return _watch_fleet(roots, as_json=as_json)
    run = require_run(RunPaths(roots[0]))
    last_job(run)
    return tell_until_end(run, 0, as_json=as_json, verbose=verbose)


def _holds_runs(place: Path) -> bool:
    try:
        return not is_run(place) and any(find_runs(place))
    except PermissionError:
        return False


# Characters of a run's name in front of its events, at most.
_LONGEST = 24


def _watch_fleet(places: Sequence[Path], *, as_json: bool) -> int:
    """Prints the events of the runs in and below `places` until none lives; returns 0, or their highest exit code."""
    bottom = render.BottomLine()
    tellers: dict[Path, story.Story] = {}
    turns = 0

    def on_event(run: Followed, event: Event) -> None:
        if as_json:
            render.json_value({"run_dir": str(run.root), **to_json(event)})
            return
        # One for each run, since a story drops what it has told already.
        text = tellers.setdefault(run.root, story.Story()).tell(event)
        if text is not None:
            # As wide as the names are: runs come while they are watched.
            room = min(max(len(one.name) for one in fleet.runs), _LONGEST)
            bottom.line(f"{render.shortened(run.root.name, room):<{room}}  {text}")

    def on_turn() -> None:
        nonlocal turns
        # Taken anew at each turn: runs come and end while they are watched.
        counts = Counter(run.state for run in fleet.runs.values())
        if as_json and not turns:
            render.json_value({"event": "watching", "runs": len(fleet.runs), "states": counts})
        # Without a terminal the counts are printed once; the events tell the rest.
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
    # After following: runs may come into a directory while it is watched.
    if not fleet.runs:
        where, remedy = ", ".join(map(str, places)), "give run directories, or the directory that holds them"
        raise NotFound("no run that was ever submitted", where=where, remedy=remedy)
    return int(code)
