"""`verl-slurm watch`: prints the events of one run, or of many, as they come."""

from pathlib import Path
from typing import Any

import click

from verl_slurm.base.errors import NotFound
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli import render, story
from verl_slurm.cli.options import PLACE, exits, json_option
from verl_slurm.journal.events import Event
from verl_slurm.journal.files import to_json

__all__ = ["tell_until_end", "watch"]


def tell_until_end(paths: RunPaths, offset: int, *, as_json: bool, verbose: bool = False) -> int:
    """Tells a run's story from byte `offset` of its journal until it ends; returns its exit code."""
    from verl_slurm.runs.follow import follow_run

    if as_json:
        return follow_run(paths, offset, lambda event: render.json_value(to_json(event)))
    bottom = render.Progress()
    teller = story.Story(verbose=verbose)

    def on_event(event: Event) -> None:
        if (text := teller.tell(event)) is not None:
            bottom.line(text)

    def on_status(status: dict[str, Any]) -> None:
        if status.get("state") in ("running", "saving", "checking"):
            bottom.show(int(status.get("step", 0)), story.progress(status))

    try:
        return follow_run(paths, offset, on_event, on_status)
    except KeyboardInterrupt:
        bottom.close()
        render.warning(f"no longer following; the run goes on. Again: verl-slurm watch {paths.root}")
        raise
    finally:
        bottom.close()


@click.command(epilog=exits(ExitCode.NOT_FOUND) + "\n\nOtherwise the exit code with which the run ended.")
@click.argument("places", metavar="RUN...", type=PLACE, nargs=-1, required=True)
@click.option("-v", "--verbose", is_flag=True, help="With Slurm's own words as evidence of each cause.")
@json_option
def watch(places: tuple[Path, ...], verbose: bool, as_json: bool) -> int:
    """Follow RUN from its first event until it ends, over all its requeues.

    Prints what the daemon wrote down (starts, causes, saves, verdicts, requeues), then each event as it happens
    and the step it is at. Of a run that was submitted again after an end, the newest job decides when the run has
    ended, and with which code. Ctrl-C ends the watching, not the run. With --json each event is one line.

    With several runs, or a directory that holds some, each event from now on is told with its run's name, until none
    lives any more; runs that come into the directory meanwhile are followed, too. The exit code is then 0, or the
    highest one with which a run ended meanwhile.
    """
    from verl_slurm.runs.record import last_job, require_run

    roots = [place.resolve() for place in places]
    for root in roots:
        if not root.exists():
            raise NotFound(
                "no such run or directory",
                where=root,
                remedy="`verl-slurm list DIR` shows the runs below DIR",
            )
    single = len(roots) == 1 and not _holds_runs(roots[0])
    if not single:
        from verl_slurm.cli.fleet_watch import watch_fleet

        return watch_fleet(roots, as_json=as_json)
    run = require_run(RunPaths(roots[0]))
    last_job(run)
    return tell_until_end(run, 0, as_json=as_json, verbose=verbose)


def _holds_runs(place: Path) -> bool:
    from verl_slurm.runs.glance import find_runs

    try:
        return not (place / "run.yaml").exists() and any(find_runs(place))
    except PermissionError:
        return False
