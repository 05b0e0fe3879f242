"""`verl-slurm list`: the runs below a directory, one line each."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from verl_slurm.base.errors import NotFound, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.best import Best, Rank, rank_best
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.lost import gone_back
from verl_slurm.cli.options import PLACE, exits, json_option
from verl_slurm.cli.show import render, story
from verl_slurm.cli.show.render import ago, span
from verl_slurm.config.load import load_resolved
from verl_slurm.journal.events import Ended
from verl_slurm.journal.files import read_events
from verl_slurm.runs.glance import Glance, Seen, ask_for, glance_at_all, is_over, state_of

FIRST_TO_GO = ("job", "updated", "reward", "checkpoint", "cost", "interrupted", "of")
"""Columns that are dropped if the terminal is narrow, in this order."""
STATE_COLOURS = {
    **dict.fromkeys(("done", "running", "RUNNING"), "green"),
    **dict.fromkeys(("queued", "PENDING", "suspended", "held"), "yellow"),
    **dict.fromkeys(("gone", "GONE", "failed", "no permission", "saves fail"), "red"),
}


@click.command("list", epilog=exits(ExitCode.NOT_FOUND))
@click.argument("place", type=PLACE, default="runs")
@click.option(
    "--state",
    "states",
    multiple=True,
    help="Only runs in this state, e.g. running, queued, gone; may be given again.",
)
@json_option
def list_runs(place: Path, states: tuple[str, ...], as_json: bool) -> None:
    """The runs below PLACE (default: runs), or, where PLACE is a run, its checkpoints, newest first.

    \b
    state   prepared, queued, starting, running, saving, ..., done, cancelled, failed with N;
            saves fail: it trains, and its newest save came to nothing;
            gone: its job is no more, and its daemon said nothing; with a ?: whether it lives is not known here
    interrupted, cost   how often, why last, and the time from the first sign to the first new rollout, in all
            (with a +: the last one is not over)

    Slurm is asked once for all runs; --state failed takes all that failed, whatever the exit code.

    Of checkpoints it tells what their manifests say (`verl-slurm verify` reads the files):

    \b
    committed     whole by its manifest
    torn          its writer died before the commit; never used, removed at the next start
    quarantined   did not verify, set aside
    foreign       not a checkpoint of ours

    With checkpoint.keep_best set, a column has that metric of the step that a checkpoint ends, and the place of those
    that are kept for it: `0.83 best`, `0.81 best 2`. --json has all of a step's metrics.
    """
    if (place / "run.yaml").is_file():
        _print_checkpoints(RunPaths(place.resolve()), as_json)
        return
    runs = glance_at_all(place.resolve())
    # Asked last: a directory without runs is an answer, and a name that does not exist is a mistake.
    if not runs and not place.is_dir():
        raise NotFound("no such directory", where=place, remedy="give the directory that holds your runs")
    # Runs that have written down their end are not asked about; all others in one question.
    seen, problem = ask_for(runs)
    # Said, and not an error: what the runs have written down is shown all the same, without a claim that they live.
    if problem:
        render.warning(f"what has no end written down is shown as last heard of: {problem}")
    told = [(run, state_of(run, seen.get(run.root))) for run in runs]
    if states:
        # By its beginning: `failed` means `failed with N`, and the `?` of an unknown life is no part of the state.
        told = [(run, state) for run, state in told if state.rstrip("?").startswith(states)]
    if as_json:
        render.json_value([_facts(run, state, seen.get(run.root)) for run, state in told])
        return
    if not runs:
        render.line(f"no runs in {place}; start one with verl-slurm submit quickstart")
        return
    if not told:
        render.line(f"none of {counted(len(runs), 'run')} in {place} is {' or '.join(states)}")
        return
    render.table(
        runs_table(told, place.resolve()),
        right=("step", "of", "reward", "cost"),
        first_to_go=FIRST_TO_GO,
        cut="run",  # as a last resort
        colours=STATE_COLOURS,
    )


def runs_table(told: Sequence[tuple[Glance, str]], place: Path) -> dict[str, list[str]]:
    """Returns cells by heading, of each run with its state."""
    return {
        "run": [os.path.relpath(run.root, place) for run, _ in told],
        "job": ["-" if run.job is None else run.job.job_id for run, _ in told],
        "state": [state for _, state in told],
        "step": [str(run.step) for run, _ in told],
        "of": [str(run.status.get("steps") or "-") for run, _ in told],
        "reward": ["-" if run.reward is None else f"{run.reward:.3f}" for run, _ in told],
        "checkpoint": [_checkpoint(run) for run, _ in told],
        "interrupted": [_interrupted(run) for run, _ in told],
        "cost": [_cost(run) for run, _ in told],
        "updated": [ago(run.status.get("updated")) for run, _ in told],
    }


def _checkpoint(run: Glance) -> str:
    words = [run.checkpoint.name] if run.checkpoint else []
    return ", ".join([*words, f"LOST {run.lost}"] if run.lost else words) or "-"


def _interrupted(run: Glance) -> str:
    if not run.interruptions:
        return "-"
    cause = str(run.last_interruption.get("cause", "?")).replace("_", " ")
    return f"{run.interruptions}, {cause}"


def _cost(run: Glance) -> str:
    if not run.interruptions:
        return "-"
    lasts = "" if run.last_interruption.get("seconds") is not None else "+"
    return f"{span(run.interrupted_s)}{lasts}"


def told_facts(run: Glance) -> dict[str, Any]:
    """Returns what the files of a run say, as JSON of `list` and `status` has it."""
    ended = run.word if isinstance(run.word, Ended) else None
    return {
        "run_dir": str(run.root),
        "job_id": None if run.job is None else run.job.job_id,
        "cluster": None if run.job is None else run.job.cluster,
        "step": run.step,
        "status": run.status,
        "checkpoint": msgspec.to_builtins(run.checkpoint),
        "lost_checkpoint": run.lost or None,
        "last_cause": story.tell(story.for_people(run.cause)) if run.cause else None,
        # Of the newest job alone: an end is none any more once the run was submitted or started again.
        "outcome": ended.outcome if ended is not None and ended.is_final else None,
        "ended": None if ended is None else story.tell(ended),
    }


def _facts(run: Glance, state: str, seen: Seen | None) -> dict[str, Any]:
    return told_facts(run) | {
        "state": state,
        # `alive` is None where it is not known; such a job is not called over.
        "job_over": is_over(run) or (seen is not None and seen.alive is False),
        "job_alive": None if seen is None else seen.alive,
        "job_state": (seen.state or None) if seen is not None else None,
        "job_detail": (seen.detail or None) if seen is not None else None,
        "interruptions": {
            "count": run.interruptions,
            "seconds": run.interrupted_s,
            "last": run.last_interruption or None,
        },
        **({"error": run.error} if run.error else {}),
    }


CHECKPOINTS_TO_GO = ("files", "ranks", "attempt", "phase", "created", "MB", "detail")
"""Columns that are dropped if the terminal is narrow, in this order."""


def _print_checkpoints(run: RunPaths, as_json: bool) -> None:
    found = list_checkpoints(run)
    config = None
    # One of another version: what there is can be listed all the same.
    with suppress(VerlSlurmError):
        config = load_resolved(run.run_yaml)
    best = Best(keep=0) if config is None else Best.of(config.checkpoint)
    places = rank_best(found, best)
    if as_json:
        numbers = {name: place.number for name, place in places.items()}
        render.json_value(
            [asdict(info) | {"path": str(info.path), "best": numbers.get(info.name)} for info in found]
        )
        return
    if not found:
        render.line(f"no checkpoints in {run.checkpoints} yet")
        return
    columns = checkpoints_table(found, places, best.metric if best.keep else None)
    render.table(columns, right=("attempt", "ranks", "files", "MB"), first_to_go=CHECKPOINTS_TO_GO)
    newest = next((info.name for info in found if info.kind == "committed"), "")
    if lost := gone_back(run, read_events(run), newest, config):
        render.warning(lost)


def checkpoints_table(
    found: Sequence[CheckpointInfo], places: Mapping[str, Rank], metric: str | None
) -> dict[str, list[str]]:
    """Returns cells by heading.

    Args:
        places: the ranks of the best checkpoints, by name.
        metric: the metric that ranks them.
    """
    columns: dict[str, list[str]] = {
        "name": [info.name for info in found],
        "kind": [info.kind for info in found],
        "phase": [info.phase or "-" for info in found],
    }
    if metric is not None:
        columns[metric] = [_metric_words(info.metrics.get(metric), places.get(info.name)) for info in found]
    return columns | {
        "attempt": ["-" if info.attempt is None else str(info.attempt) for info in found],
        "ranks": ["-" if info.world_size is None else str(info.world_size) for info in found],
        "files": [str(info.num_files) for info in found],
        "MB": [f"{info.num_bytes / 1e6:.1f}" for info in found],
        "created": [info.created_utc or "-" for info in found],
        "detail": [info.detail for info in found],
    }


def _metric_words(value: float | None, place: Rank | None) -> str:
    if value is None:
        return "-"
    mark = "" if place is None else " best" if place.number == 1 else f" best {place.number}"
    return f"{value:.4g}{mark}"
