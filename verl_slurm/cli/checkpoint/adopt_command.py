"""`verl-slurm adopt`."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from verl_slurm.base.errors import NotFound
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import require_safe_folder
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import MANIFEST
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.cli.command_options import KEY_VALUE, PLACE, command, flag
from verl_slurm.cli.show import render
from verl_slurm.journal.events import Adopted
from verl_slurm.journal.files import append_event
from verl_slurm.submit.submission_plan import SubmissionPlan
from verl_slurm.verl import adopt as adoption
from verl_slurm.verl.shards import Judged, judge_all, list_steps, step_bytes
from verl_slurm.verl.step_layout import step_of
from verl_slurm.verl.tracker import Tracker, look_at_tracker, write_tracker

_HOW = {
    "clone": "cloned (shares blocks, no room taken)",
    "copy": "copied",
    "link": "hard-linked: the same files",
}
_COLOURS = {
    **dict.fromkeys(("whole", "adopted", "there"), "green"),
    **dict.fromkeys(("broken", "failed"), "red"),
    "refused": "yellow",
}


@command("CONFIG DATA PERMISSION CORRUPT NOT_FOUND FENCED NO_ROOM")
@click.argument("directory", type=PLACE, metavar="DIR")
@click.argument("run", type=PLACE, required=False, metavar="[RUN]")
@click.argument("overrides", type=KEY_VALUE, nargs=-1, metavar="[KEY=VALUE]...")
@flag("--all", "Take whole steps, too, that the run's retention would drop.", "take_all")
@flag("--link", "Hard links instead of copies: no room taken, but plain verl must never save into DIR again.")
@flag("--keep-tracker", "Leave DIR's tracker as it is.")
@flag("--dry-run", "Read and judge everything, change nothing.")
def adopt(
    directory: Path,
    run: Path | None,
    overrides: tuple[str, ...],
    take_all: bool,
    link: bool,
    keep_tracker: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Judge the checkpoints that plain verl left in DIR, and take them over into RUN.

    DIR is verl's trainer.default_local_dir, the one with global_step_N in it. Every byte of every step is read and
    held against the CRC-32s that torch.save wrote: what is missing, empty, cut off or has a flipped bit is found.
    Nothing is unpickled.

    RUN is a run's directory, or a configuration with `trainer.backend: verl` that describes one. Whole steps become
    its checkpoints, with a manifest and digests, as many as its retention keeps; `verl-slurm submit RUN` goes on from
    the newest. They are cloned where the file system can share blocks, else copied, read back and judged again. What
    is broken is named with its reason and stays where it is, as does all of DIR.

    DIR's tracker (latest_checkpointed_iteration.txt) is pointed to the newest whole step: with an empty one verl
    crashes at every start, without one it silently starts from step 0. Without RUN that is all that is done, so that
    plain verl, too, resumes right. Done twice, it finds itself done.

    \b
    verl-slurm adopt checkpoints/gsm8k/grpo --dry-run
    verl-slurm adopt checkpoints/gsm8k/grpo my.yaml name=grpo
    verl-slurm submit my.yaml name=grpo
    """
    from verl_slurm.submit.submission import plan_verl_run

    directory = _require_directory(directory)
    if run is not None:
        # Other users could choose the steps, even though each is judged. `copying` ensures that the judged bytes are
        # the copied ones.
        require_safe_folder(
            directory,
            "others can put steps of theirs in the place of these",
            "copy the steps to a directory of your own, and adopt again",
        )
    bar = render.Bar(enabled=not as_json)
    with ExitStack() as held:
        held.callback(bar.close)
        # An impossible run is refused now, before the hours of reading.
        plan = None if run is None else plan_verl_run(run, overrides, dry_run=dry_run)
        counter = bar.counter("reading verl's checkpoints", sum(map(step_bytes, list_steps(directory))))
        # Every byte of every step, also of those that the run has already: what is broken is to be named.
        judged = judge_all(directory, on_bytes=counter)
        tracker = look_at_tracker(directory, judged)
        if plan is None:
            rows = adoption.judged_rows(judged)
        else:
            rows = _into_run(held, plan, judged, bar, take_all, link, dry_run)
        # After the run has its copies: a failure there leaves DIR as it was. Without a whole step nothing is written,
        # as any number would be wrong.
        wanted = tracker.wanted if tracker.needs_repair and not keep_tracker and not dry_run else None
        problem = "" if wanted is None else _point_tracker(directory, wanted)
    repaired = wanted is not None and not problem
    tracker_facts = {"newest_whole": tracker.wanted, "repaired": repaired, "found": tracker.line}
    facts = {
        "directory": str(directory),
        "run_dir": None if plan is None else str(plan.run_dir),
        "dry_run": dry_run,
        "steps": [_facts(row) for row in rows],
        "tracker": render.picked(tracker, "state step") | tracker_facts,
        # Of whole steps alone: a broken one is not taken, so what could not be checked in it does not matter.
        "unchecked": sorted({name for one in judged if one.ok for name in one.unchecked}),
    }
    if as_json:
        render.json_value(facts)
    else:
        _say(facts, tracker)
    if problem:
        render.warning(f"the tracker cannot be written: {problem}")
    if tracker.wanted is None or any(row.choice == "failed" for row in rows):
        return ExitCode.CORRUPT
    # Without a run the tracker was all that was asked for; beside one it is an extra.
    return ExitCode.PERMISSION if problem and plan is None else ExitCode.OK


def _point_tracker(directory: Path, step: int) -> str:
    """Returns why the tracker could not be pointed to a step; empty: it was."""
    try:
        write_tracker(directory, step)
    except OSError as error:  # an archive, or another user's: a run can take it over all the same
        return error.strerror or str(error)
    return ""


def _require_directory(directory: Path) -> Path:
    here = directory.resolve()
    remedy: str | None = None
    if not here.is_dir():
        what = "no such directory"
    elif step_of(here.name) is not None:
        what, remedy = "one step of verl, not its directory", f"verl-slurm adopt {shell_word(here.parent)}"
    elif (here / MANIFEST).exists():
        what, remedy = "a checkpoint of a run already", f"verl-slurm verify {shell_word(here.parent.parent)}"
    elif not any(step_of(path.name) is not None for path in here.iterdir()):
        what = "no checkpoint of verl in there"
    else:
        return here
    expected = "global_step_N in it, as in verl's trainer.default_local_dir"
    raise NotFound(what, where=directory, expected=expected, remedy=remedy)


def _into_run(
    held: ExitStack,
    plan: SubmissionPlan,
    judged: list[Judged],
    bar: render.Bar,
    take_all: bool,
    link: bool,
    dry_run: bool,
) -> list[adoption.AdoptedStep]:
    from verl_slurm.submit.submission import hold_run

    config, paths = plan.config, RunPaths(plan.run_dir)
    committed = [info for info in list_checkpoints(paths) if info.kind == "committed"]
    there = {info.step for info in committed}
    rows = adoption.plan_adoption(
        judged,
        committed,
        entry=config.trainer.entry,
        world_size=config.distributed.world_size,
        keep_last=config.checkpoint.keep_last,
        keep_every=config.checkpoint.keep_every,
        take_all=take_all,
        another={one.step for one in judged if one.step in there and not adoption.is_adopted(paths, one)},
    )
    # Before the run is made: a run that can resume from none of the steps would stay behind empty.
    adoption.refuse_if_nothing_fits(rows)
    chosen = [row.judged for row in rows if row.choice == "adopt"]
    if dry_run or not chosen:
        return rows
    # Held by the caller's stack until the tracker is written, too. A dry run, or one with nothing to take, makes no
    # run.
    held.enter_context(hold_run(plan))
    # Each is copied, and the copy read back.
    counter = bar.counter("copying and reading back", 2 * sum(one.num_bytes for one in chosen))
    done = {row.judged.step: row for row in adoption.adopt_steps(paths, rows, link=link, on_bytes=counter)}
    if names := [row.saved.name for row in done.values() if row.saved is not None]:
        append_event(paths, Adopted(names, str(chosen[0].path.parent)))
    return [done.get(row.judged.step, row) for row in rows]


def _facts(row: adoption.AdoptedStep) -> dict[str, Any]:
    return {
        **render.picked(row.judged, "name step world_size num_bytes problems"),
        **render.picked(row, "why how"),
        # After the work none of these is left.
        "state": "would adopt" if row.choice == "adopt" else row.choice,
        "checkpoint": row.saved and row.saved.name,
    }


def _say(facts: dict[str, Any], tracker: Tracker) -> None:
    steps = facts["steps"]

    def cells(step: dict[str, Any]) -> tuple[object, ...]:
        size = f"{step['num_bytes'] / 1e6:.1f}"
        return step["name"], step["state"], step["world_size"], size, step["why"]

    headings = ("step", "", "ranks", "MB", "why")
    render.table(headings, map(cells, steps), right=("ranks", "MB"), colours=_COLOURS)
    for how, count in sorted(Counter(one["how"] for one in steps if one["how"]).items()):
        render.line(f"{count} {_HOW[how]}; each verified with SHA-256 from here on")
    if unchecked := facts["unchecked"]:
        shown = ", ".join(unchecked[:3]) + (f" and {len(unchecked) - 3} more" if len(unchecked) > 3 else "")
        render.line(f"without a checksum of their own, taken as they are: {shown}")
    if not tracker.needs_repair or facts["tracker"]["repaired"]:
        render.line(f"{tracker.line}{': repaired' * tracker.needs_repair}")
    else:
        then = "would be repaired" if facts["dry_run"] else "left as it is"
        hopeless = "left as it is; verl cannot resume here"
        render.warning(f"{tracker.line}: {hopeless if tracker.wanted is None else then}")
    there = any(one["state"] in ("adopted", "there") for one in steps) and not facts["dry_run"]
    if facts["run_dir"] and there:
        render.line(f"go on with: verl-slurm submit {shell_word(facts['run_dir'])}")
