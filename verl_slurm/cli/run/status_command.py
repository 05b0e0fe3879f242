"""`verl-slurm status` and `list`: where one run stands, or all runs below a directory."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from verl_slurm.base.errors import NotFound, VerlSlurmError
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.best import Best, Rank, rank_best
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.lost import former_checkpoint, gone_back, lost_rollouts, missing_in_tiers
from verl_slurm.cli.command_options import PLACE, RUN, Whole, command, option
from verl_slurm.cli.show import render, run_tables, story
from verl_slurm.cli.show.render import ago, span
from verl_slurm.config.load import is_run, load_resolved
from verl_slurm.journal.events import Ended, Event, RequeueAsked, Started, Submitted, Warned
from verl_slurm.journal.files import read_events, read_history
from verl_slurm.journal.history import History, interruption_facts, since
from verl_slurm.journal.pace import LOOKED_AT, node_states, pace_of, steps_of_equal_rewards
from verl_slurm.journal.status import read_status
from verl_slurm.journal.steps import last_steps
from verl_slurm.program.code_record import read_record
from verl_slurm.runs.glance import (
    Glance,
    Seen,
    ask_for,
    end_of_slurm_job,
    glance,
    glance_at_all,
    is_over,
    requeue_after_end,
    state_of,
)
from verl_slurm.runs.liveness import JobState, job_state, requeued_words, unknown_jobs, was_requeued
from verl_slurm.runs.requests import misplaced
from verl_slurm.runs.run_record import has_ledger, lead_log, require_run
from verl_slurm.wire.reward_plan import read_reward_plan, read_reward_request

# Characters of a bar or a curve.
_MOST_DRAWN = 30


@command("NOT_FOUND")
@click.argument("run", type=RUN)
@option(
    "--steps",
    Whole(min=0, max=1000),
    "How many of the last steps are shown, 0: none.",
    "num_steps",
    default=5,
)
@option(
    "--interruptions",
    Whole(min=0),
    "How many of the last interruptions are shown, 0: none. JSON has them all.",
    "num_interruptions",
    default=5,
)
def status(run: RunPaths, num_steps: int, num_interruptions: int, as_json: bool) -> None:
    """Where RUN stands: its job, step, last good checkpoint, what interrupted it and what that cost, its last steps.

    Each interruption costs the time from its first sign (Slurm's warning, the crash) to the first rollout that is
    new: the save, the wait in the queue, the ranks' start, and what is done again. No token is lost where the ranks
    went on from what they saved when they stopped. Elsewhere the unfinished micro-batches are; finished rollouts are
    kept by loops with a ledger, and others do again what came after their last checkpoint.

    RUN is a run directory, as `submit` printed it. The table has a line for each of the last steps; with --json, a
    row of `steps` has every number there is of a step: rewards, losses, KL, gradients, learning rates, those of an
    evaluation (`eval/...`), and seconds, tokens per second and memory.
    """
    # The facts: files of the run, and one question to the scheduler. The rest of the function shows them.
    events, now = read_events(run), datetime.now(UTC)
    history = History(events)
    facts = _facts(run, history)
    facts["reward"] = _reward_in_force(run, facts["step"])
    facts["code"] = _code_words(run, events)
    facts["lost"] = _losses(run, facts, events, history)
    outages = history.outages_until(now)
    facts["interruptions"] = interruption_facts(outages, now, has_ledger=has_ledger(run))
    facts["journal"] = _faults(run, events, history)
    # Why the newest one that was asked for did not come.
    facts["requeue"] = [event.text for event in _warned(since(events, Started, RequeueAsked), "requeue")]
    rows = last_steps(run, max(num_steps, LOOKED_AT), facts["journal"])
    facts["steps"] = rows[-num_steps:] if num_steps else []
    curve = run_tables.curve_of(rows[-LOOKED_AT:])
    pace = pace_of(rows, facts["step"], facts["status"].get("steps"))
    facts["equal_rewards"] = {
        "steps": steps_of_equal_rewards(rows[-LOOKED_AT:]),
        "of": len(rows[-LOOKED_AT:]),
    }
    facts |= {"pace": pace, "curve": curve, "nodes": _nodes(run, facts, history, now)}
    if as_json:
        render.json_value(facts)
        return
    snapshot = facts["status"]
    verified = snapshot.get("last_checkpoint")
    hidden = run.checkpoints.exists() and not os.access(run.checkpoints, os.R_OK)
    lines: list[tuple[str, object]] = [
        ("run", facts["run_dir"]),
        ("place", facts["misplaced"] and f"WARNING, {facts['misplaced']}"),
        ("job", facts["unknown_job"]),
        ("job", _job_words(facts, run)),
        ("held", facts["held"]),
        ("not begun", facts["start_failed"]),
        # As its lead last wrote it; a run that has not started has none.
        *(_snapshot_lines(facts, now) if snapshot else ()),
        *(("code", line) for line in facts["code"]),
        *((name, f"WARNING, {said}") for name in ("lost", "journal", "requeue") for said in facts[name]),
        ("reward", facts["reward"] and _reward_words(facts["reward"])),
        *((f"service {place}", said) for place, said in snapshot.get("services", {}).items()),
        ("checkpoint", verified if hidden and verified else _checkpoint_words(run, facts, history)),
        ("interrupted", run_tables.interruption_words(facts["interruptions"]) if events else None),
        ("last cause", facts["last_cause"]),
        ("ended", facts["ended"]),
    ]
    render.fields(lines, STATE_COLOURS)
    # The newest ones; --json has them all.
    if outages and num_interruptions:
        render.line()
        render.table(
            run_tables.interruptions_table(outages[-num_interruptions:], now, has_ledger=has_ledger(run)),
            right=("cost", "save", "queue", "start", "again"),
            first_to_go=run_tables.INTERRUPTIONS_TO_GO,
        )
    if facts["steps"]:
        render.line()
        columns, first_to_go = run_tables.steps_table(facts["steps"])
        render.table(columns, right=columns, first_to_go=first_to_go)


def _job_words(facts: dict[str, Any], run: RunPaths) -> str | None:
    if facts["job_id"] is None:
        return None if facts["unknown_job"] else f"none yet; verl-slurm submit {shell_word(run.root)}"
    state = ", ".join(word for word in (facts["job_state"], facts["job_detail"]) if word)
    if facts["outcome"] and (facts["job_over"] or facts["job_state"] == "UNKNOWN"):
        state = facts["outcome"]  # a scheduler forgets its jobs, the journal does not
    return f"{facts['job_id']} ({facts['cluster']}): {state}"


def _snapshot_lines(facts: dict[str, Any], now: datetime) -> Iterator[tuple[str, object]]:
    """Yields what the lead last wrote, and what follows of it."""
    snapshot, pace, curve, nodes = facts["status"], facts["pace"], facts["curve"], facts["nodes"]
    yield "state", _state_words(facts)
    if problem := snapshot.get("save_problem"):
        yield "saves", f"FAIL, so all since the checkpoint below would be done again: {problem}"
    yield "training", story.progress(snapshot | {"step": facts["step"]})
    # For terminals: a bar or a curve tells nothing that the words beside it do not.
    drawn = min(_MOST_DRAWN, render.width() // 3) if render.draws() else 0
    before = f"{render.bar(pace.share, drawn)} " if pace.share is not None and drawn else ""
    yield "steps", before + run_tables.steps_words(pace)
    over = facts["job_over"] or facts["job_id"] is None or facts["outcome"] is not None
    starts, ends = facts["job_starts"], facts["job_ends"]
    yield (
        "time left",
        run_tables.left_words(pace, waits=facts["job_waits"], over=over, starts=starts, ends=ends, now=now),
    )
    yield "trend", curve and run_tables.curve_words(curve, drawn)
    if equal := facts["equal_rewards"]["steps"]:
        of = counted(facts["equal_rewards"]["of"], "step")
        words = f"WARNING, all equal in {len(equal)} of the last {of}, newest {equal[-1]:.0f}"
        yield "rewards", f"{words}: nothing is learned from them"
    requeues = counted(snapshot.get("requeues") or 0, "requeue")
    yield "starts", f"attempt {snapshot.get('attempt')}, {requeues}, restart {snapshot.get('restart')}"
    yield "stragglers", ", ".join(map(str, snapshot.get("stragglers") or ()))
    spare = "; a spare one is idle, and a part of what the job costs" * ("spare" in nodes)
    yield "nodes", run_tables.node_words(nodes) + spare


def _nodes(run: RunPaths, facts: dict[str, Any], history: History, now: datetime) -> dict[str, list[str]]:
    try:
        avoid_s = load_resolved(run.run_yaml).daemon.avoid_node_s
    # A file that cannot be read costs this part of the answer, and not the others.
    except (OSError, VerlSlurmError):
        avoid_s = 0
    gone = facts["job_id"] is None or facts["job_over"] or facts["job_waits"] or facts["outcome"] is not None
    avoided = history.avoided_nodes((), now, avoid_s)
    return node_states(facts["status"], history.lost_nodes, avoided, has_nodes=not gone)


def _state_words(facts: dict[str, Any]) -> str:
    word, state, since = facts["state"], facts["status"].get("state"), ago(facts["status"].get("updated"))
    known = facts["outcome"] or word.rstrip("?") in (state, "saves fail")
    # A snapshot outlives its lead.
    return f"{word}, as of {since}" if known else f"{word}; {state} when its daemon last said so, {since}"


def _facts(run: RunPaths, history: History) -> dict[str, Any]:
    seen, where = glance(run.root, history), misplaced(run)
    answer: JobState | None = None
    if seen.job is not None:
        try:
            answer = job_state(run, seen.job)
        except VerlSlurmError as error:
            # Slurm's silence hides nothing of what the run's own files say.
            answer = JobState(state="UNKNOWN", over=False, detail=error.one_line())
    unknown = ""
    if answer is None or (answer.over and not is_over(seen)):
        unknown = _unknown_job(run, history, seen)
    end = end_of_slurm_job(seen)
    requeued = ""
    if end is not None and answer is not None and was_requeued(end.at, answer):
        requeued = requeued_words(run.root, end.job_id or "", end.outcome)
    facts = told_facts(seen, requeued)
    if history.outages and history.outages[-1].cause == "crash":
        facts["last_cause"] = history.last_fault or None
    # As `ask_for` has it for `list`.
    here = Seen(True, "PENDING") if seen.job is None and unknown[:1].isdigit() else None
    if answer is not None and (requeued or not is_over(seen)):
        alive = None if answer.state == "UNKNOWN" else not answer.over
        here = Seen(alive, answer.state, answer.detail.partition("; ")[0])
    if answer is not None and answer.over and not is_over(seen) and not unknown:
        facts["ended"] = (
            "cancelled by its user" + " before it started" * isinstance(seen.word, Submitted)
            if seen.is_cancelled
            else _over_words(run, facts["ended"], answer, where)
        )
    held, failed, not_begun = history.held, history.start_failed, ""
    if held is not None or is_over(seen) or (answer is not None and answer.over):
        failed = None
    elif isinstance(seen.last, Warned) and seen.last.topic == "start" and not (answer and answer.waits):
        failed, not_begun = None, f"the start waits: {seen.last.text}"
    if failed is not None:
        not_begun = (
            f"{counted(failed.before + 1, 'attempt')} in a row, and the next comes by itself: {failed.detail}"
        )
    return facts | {
        "misplaced": where,
        "state": state_of(seen, here),
        "held": "" if held is None else held.reason,
        "start_failed": not_begun,
        "unknown_job": unknown,
        "job_state": answer and answer.state,
        **{f"job_{name}": getattr(answer or _NO_JOB, name) for name in _OF_A_JOB},
        "submitted": isinstance(seen.word, Submitted),
    }


_OF_A_JOB = ("detail", "over", "waits", "starts", "ends")
_NO_JOB = JobState(state="", over=False)


def _over_words(run: RunPaths, ended: str | None, answer: JobState, elsewhere: str) -> str:
    """Describes the end of a job that the journal does not have."""
    # The journal's own word is that of the attempt before.
    # It was killed, or failed before its daemon ran.
    before = "its requeue was asked for, and" if ended else "without a word of its daemon:"
    see = f"see verl-slurm logs {shell_word(run.root)}"
    if answer.state == "FAILED" and not lead_log(run).exists():
        see = (
            "its script wrote nothing: its node did not see RUN, or slurmd's log there says why (TaskProlog?)"
        )
    goes_on = "" if elsewhere else f"; `verl-slurm submit {shell_word(run.root)}` goes on"
    return f"{before} the job is over ({answer.state}); {see}{goes_on}"


def _unknown_job(run: RunPaths, history: History, seen: Glance) -> str:
    try:
        unknown = unknown_jobs(run, history) if shutil.which("squeue") else []
    except VerlSlurmError as error:
        # A local run is none of Slurm's.
        is_local = seen.job is not None and seen.job.cluster == "local"
        return "" if is_local else f"not known: {error.one_line()}"
    if not unknown:
        return ""
    ends = f"verl-slurm cancel {shell_word(run.root)} ends it"
    return f"{unknown[-1]}, which the journal does not name: it is queued; {ends}"


def _code_words(run: RunPaths, events: list[Event]) -> list[str]:
    try:
        record = read_record(run, to_look=True)
    # A file that cannot be read costs this line of the answer, and not the others.
    except (OSError, VerlSlurmError) as error:
        return [f"unknown: {error}"]
    lines = [] if record is None else record.lines()
    # Of the newest attempt: a later one may have found the former packages again.
    warned = _warned(since(events, Started, Submitted), "code", "packages", "rates")
    # Each start says it.
    told = dict.fromkeys(f"WARNING, {event.topic}: {event.text}" for event in reversed(warned))
    return [*lines, *told]


def _warned(events: list[Event], *topics: str) -> list[Warned]:
    return [event for event in events if isinstance(event, Warned) and event.topic in topics]


def _faults(run: RunPaths, events: list[Event], history: History) -> list[str]:
    """Returns what is wrong with the journal and the snapshot."""
    told = [event.text for event in (*history.foreign, *_warned(events, "journal"))]
    read_status(run, told)
    return list(dict.fromkeys(told))


def _losses(run: RunPaths, facts: dict[str, Any], events: list[Event], history: History) -> list[str]:
    """Returns what starts since the last submission found lost, and what the next one will."""
    told = _warned(since(events, Submitted), "checkpoint", "rollouts")
    reached = checkpoint_order(facts["status"].get("last_checkpoint", "")) or (-1, -1)
    # Until the run is done, or has passed the checkpoint that the text begins with.
    lines = [
        event.text
        for event in told
        if facts["outcome"] != "done"
        and (checkpoint_order(event.text.partition(" ")[0]) or (reached[0] + 1, 0)) > reached
    ]
    last = next((one for one in history.outages[-1:] if one.seconds is None and one.resumed is None), None)
    ended = facts["job_over"] or facts["job_waits"] or facts["outcome"] is not None
    # While ranks are at work nothing is lost yet; and a colleague (`group`) sees no checkpoints.
    if not (ended or last) or not os.access(run.checkpoints, os.R_OK):
        return lines
    if last is not None and last.saved:
        last.verified &= os.path.lexists(run.checkpoints / last.saved)
    # A file that cannot be read costs this line of the answer, and not the others.
    with suppress(OSError, VerlSlurmError):
        name = facts["checkpoint"]["name"] if facts["checkpoint"] else ""
        if lost := lost_rollouts(run, load_resolved(run.run_yaml), history, name):
            lines.append(lost)
            if last is not None:
                # Noted in the interruption that is not over.
                last.rollouts_lost = lost
    return lines


def _reward_in_force(run: RunPaths, now: int) -> dict[str, Any] | None:
    """Returns the reward of the running step, since when, and an open replacement. None: a guest's loop."""
    try:
        # Not for `list`: to read a thousand configurations takes many seconds.
        config = load_resolved(run.run_yaml)
        if config.trainer.is_guest:
            return None
        first = config.model.reward
        plan, wish = read_reward_plan(run), read_reward_request(run)
    # A file that cannot be read costs this line of the answer, and not the others.
    except (OSError, VerlSlurmError) as error:
        return {"reward": None, "problem": str(error)}
    number = plan.at(now)
    switch = plan.switches[number - 1] if number else None
    # At step 0 there are no scores yet that a warm start could begin from.
    left = max(switch.step + switch.warm_start_steps - now, 0) if switch and switch.step else 0
    return {
        "reward": plan.in_force(number, first),
        "since_step": switch.step + 1 if switch else 1,
        "warm_start_steps_left": left,
        "replacements": number,
        "asked_for": wish.reward if wish is not None and wish.number > plan.handled else None,
        "refused": plan.refused or None,
    }


def _reward_words(facts: dict[str, Any]) -> str:
    if facts["reward"] is None:
        return f"not known: {facts['problem']}"
    words = [facts["reward"]]
    if facts["replacements"]:
        words.append(f"since step {facts['since_step']}")
    if facts["warm_start_steps_left"]:
        words.append(f"warm start for {facts['warm_start_steps_left']} more steps")
    if facts["asked_for"]:
        words.append(f"{facts['asked_for']} is asked for and follows at the end of a step")
    if facts["refused"]:
        words.append(f"another one was REFUSED: {facts['refused']}")
    return ", ".join(words)


def _checkpoint_words(run: RunPaths, facts: dict[str, Any], history: History) -> str:
    checkpoint, verified = facts["checkpoint"], facts["status"].get("last_checkpoint")
    if checkpoint is None:
        # A loop that was started by hand has no logs and keeps no journal.
        with suppress(OSError, VerlSlurmError):
            config = load_resolved(run.run_yaml)
            if trace := former_checkpoint(run, config, by_hand=not run.logs.exists()):
                return f"LOST ({trace}); verl-slurm submit {shell_word(run.root)} names the ways on"
        return "none yet"
    size = checkpoint["num_bytes"] / 1e6
    # The newest checkpoint need not be the last one that was read back: a save may have come since.
    good = "verified by the daemon" if checkpoint["name"] == verified else "see verl-slurm verify"
    words = f"{checkpoint['name']}, {size:.1f} MB, {ago(checkpoint['created_utc'])}, {good}"
    with suppress(OSError, VerlSlurmError):
        if lost := gone_back(run, history, checkpoint["name"], load_resolved(run.run_yaml)):
            return f"{words}; WARNING, {lost}"
        # While it lives, its mover is at work.
        missing = facts["outcome"] and missing_in_tiers(run, load_resolved(run.run_yaml), checkpoint["name"])
        if missing:
            return f"{words}; WARNING, {missing}: verl-slurm tiers {shell_word(run.root)} --offload"
    return words


# Columns that are dropped if the terminal is narrow, in this order.
FIRST_TO_GO = ("job", "updated", "reward", "checkpoint", "cost", "interrupted", "of")
STATE_COLOURS = {
    **dict.fromkeys(("done", "running", "RUNNING"), "green"),
    **dict.fromkeys(("queued", "PENDING", "suspended", "held"), "yellow"),
    **dict.fromkeys(("gone", "GONE", "failed", "no permission", "saves fail"), "red"),
}


@command("NOT_FOUND", "list")
@click.argument("place", type=PLACE, default="runs")
@click.option(
    "--state",
    "states",
    multiple=True,
    help="Only runs in this state, e.g. running, queued, gone; may be given again.",
)
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
    foreign       not a checkpoint of this run

    With checkpoint.keep_best set, a column has that metric of the step that a checkpoint ends, and the place of those
    that are kept for it: `0.83 best`, `0.81 best 2`. --json has all of a step's metrics.
    """
    if is_run(place):
        require_run(RunPaths(place.resolve()))
        _print_checkpoints(RunPaths(place.resolve()), as_json)
        return
    runs = glance_at_all(place.resolve())
    # Asked last: a directory without runs is an answer, and a name that does not exist is a mistake.
    if not runs and not place.is_dir():
        raise NotFound("no such directory", where=place, remedy="give the directory that holds your runs")
    # In one question; those that have written down their end too, since a job may have been requeued after it.
    seen, problem = ask_for(runs)
    # Said, and not an error: what the runs have written down is shown all the same, without a claim that they live.
    # Of runs that are over the journal's word stands.
    if problem and any(run.job is None or not is_over(run) for run in runs):
        render.warning(f"the runs are shown as last heard of: {problem}")
    told = [(run, state_of(run, seen.get(run.root))) for run in runs]
    if states:
        # By its beginning: `failed` means `failed with N`, and the `?` of an unknown life is no part of the state.
        told = [(run, state) for run, state in told if state.rstrip("?").startswith(states)]
    if as_json:
        render.json_value([_listed_facts(run, state, seen.get(run.root)) for run, state in told])
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
    for run, _ in told:
        requeued = requeue_after_end(run, seen.get(run.root))
        for text in (*run.foreign, *([requeued] if requeued else ())):
            render.warning(text)
        if run.job is not None and (answer := seen.get(run.root)) is not None and answer.left:
            render.warning(f"{run.root.name}: job {run.job.job_id} {answer.left}")


def runs_table(told: Sequence[tuple[Glance, str]], place: Path) -> dict[str, list[str]]:
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
    return f"{span(run.cost_s)}{lasts}"


_CHECKPOINT = "name step safe_point created_utc num_bytes"


def told_facts(run: Glance, requeued: str) -> dict[str, Any]:
    """Returns what the files of a run say, as JSON of `list` and `status` has it. `requeued`: since its end."""
    ended = run.word if isinstance(run.word, Ended) else None
    began = str(run.last_interruption.get("began", ""))
    return {
        "run_dir": str(run.root),
        "job_id": None if run.job is None else run.job.job_id,
        "cluster": None if run.job is None else run.job.cluster,
        "step": run.step,
        "status": run.status,
        "checkpoint": run.checkpoint and render.picked(run.checkpoint, _CHECKPOINT),
        "lost_checkpoint": run.lost or None,
        # One from before the newest interruption is not why that came, e.g. a crash.
        "last_cause": story.tell(story.for_people(run.cause))
        if run.cause and run.cause.time >= began
        else None,
        # Of the newest job alone: an end is none any more once the run was submitted, requeued or started again.
        "outcome": ended.outcome if ended is not None and ended.is_final and not requeued else None,
        "ended": requeued or (None if ended is None else story.tell(ended)),
    }


def _listed_facts(run: Glance, state: str, seen: Seen | None) -> dict[str, Any]:
    return told_facts(run, requeue_after_end(run, seen)) | {
        "state": state,
        # `alive` is None where it is not known; such a job is not called over.
        # A run without a job may have one that its journal does not name.
        "job_over": is_over(run)
        if seen is None or (run.job is None and not seen.alive)
        else seen.alive is False,
        "job_alive": None if seen is None else seen.alive,
        "job_state": (seen.state or None) if seen is not None else None,
        "job_detail": (seen.detail or None) if seen is not None else None,
        "interruptions": {
            "count": run.interruptions,
            "seconds": round(run.cost_s, 3),
            "last": run.last_interruption or None,
        },
        **({"error": run.error} if run.error else {}),
        **({"journal": run.foreign} if run.foreign else {}),
    }


# Columns that are dropped if the terminal is narrow, in this order.
CHECKPOINTS_TO_GO = ("files", "ranks", "attempt", "phase", "created", "MB", "detail")


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
        render.line(f"no checkpoints in {run.checkpoints}; verl-slurm status {shell_word(run.root)}")
        return
    columns = checkpoints_table(found, places, best.metric if best.keep else None)
    render.table(columns, right=("attempt", "ranks", "files", "MB"), first_to_go=CHECKPOINTS_TO_GO)
    newest = next((info.name for info in found if info.kind == "committed"), "")
    if lost := gone_back(run, read_history(run), newest, config):
        render.warning(lost)


def checkpoints_table(
    found: Sequence[CheckpointInfo], places: Mapping[str, Rank], metric: str | None
) -> dict[str, list[str]]:
    """Returns cells by heading; `metric` has given the best checkpoints their `places`."""
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
