"""`verl-slurm status`: the present state of one run and its history."""

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.options import RUN, Whole, exits, json_option
from verl_slurm.cli.show import render, story
from verl_slurm.cli.show.render import ago

if TYPE_CHECKING:
    from verl_slurm.journal.events import Event

__all__ = ["status"]


@click.command(epilog=exits(ExitCode.NOT_FOUND))
@click.argument("run", type=RUN)
@click.option(
    "--steps",
    "num_steps",
    type=Whole(min=0, max=1000),
    default=5,
    show_default=True,
    help="How many of the last steps are shown, 0: none.",
)
@click.option(
    "--interruptions",
    "num_interruptions",
    type=Whole(min=0),
    default=5,
    show_default=True,
    help="How many of the last interruptions are shown, 0: none. JSON has them all.",
)
@json_option
def status(run: RunPaths, num_steps: int, num_interruptions: int, as_json: bool) -> int:
    """Where RUN stands: its job, step, last good checkpoint, what interrupted it and what that cost, its last steps.

    Each interruption costs the time from its first sign (Slurm's warning, the crash) to the first rollout that is
    new: the save, the wait in the queue, the ranks' start, and what is done again. No token is lost where the ranks
    went on from what they saved when they stopped; elsewhere the unfinished micro-batches are, finished rollouts never.

    RUN is a run directory, as `submit` printed it. The table has a line for each of the last steps; with --json, a
    row of `steps` has every number there is of a step: rewards, losses, KL, gradients, learning rates, those of an
    evaluation (`eval/...`), and seconds, tokens per second and memory.
    """
    from verl_slurm.cli.run.listing import STATE_COLOURS
    from verl_slurm.cli.show.run_tables import (
        interruption_facts,
        interruption_words,
        interruptions_table,
        steps_table,
    )
    from verl_slurm.journal.files import read_events
    from verl_slurm.journal.folds.outages import Outages
    from verl_slurm.journal.steps import last_steps

    # The facts: files of the run, and one question to the scheduler. The rest of the function shows them.
    events, now = read_events(run), datetime.now(UTC)
    facts, outages = _facts(run, events), Outages(events)
    facts["step"] = _step_of(facts)
    facts["reward"] = _reward_in_force(run, facts["step"])
    facts["code"] = _code_words(run, events)
    facts["interruptions"] = interruption_facts(outages, now)
    facts["steps"] = last_steps(run, num_steps) if num_steps else []
    if as_json:
        render.json_value(facts)
        return ExitCode.OK
    snapshot = facts["status"]
    rows: list[tuple[str, object]] = [("run", facts["run_dir"])]
    if facts["job_id"] is None:
        rows.append(("job", f"none yet; verl-slurm submit {run.root}"))
    else:
        detail = f", {facts['job_detail']}" if facts["job_detail"] else ""
        state = f"{facts['job_state']}{detail}"
        if facts["outcome"] and (facts["job_over"] or facts["job_state"] == "UNKNOWN"):
            state = facts["outcome"]  # a scheduler forgets its jobs, the journal does not
        rows.append(("job", f"{facts['job_id']} ({facts['cluster']}): {state}"))
    # As its lead last wrote it; a run that has not started has none.
    if snapshot:
        rows.append(("state", _state_words(facts)))
        rows.append(("training", story.progress(snapshot | {"step": facts["step"]})))
        counts = (snapshot.get("attempt"), snapshot.get("requeues"), snapshot.get("restart"))
        rows.append(("starts", "attempt {}, {} requeues, restart {}".format(*counts)))
        if slow := snapshot.get("stragglers"):
            rows.append(("stragglers", ", ".join(map(str, slow))))
        if spare := snapshot.get("spare_nodes"):
            rows.append(
                ("spare nodes", f"{', '.join(map(str, spare))}: idle, and a part of what the job costs")
            )
    rows += [("code", line) for line in facts["code"]]
    if facts["reward"] is not None:
        rows.append(("reward", _reward_words(facts["reward"])))
    rows += [(f"service {place}", said) for place, said in snapshot.get("services", {}).items()]
    verified = snapshot.get("last_checkpoint")
    hidden = run.checkpoints.exists() and not os.access(run.checkpoints, os.R_OK)
    rows.append(
        (
            "checkpoint",
            str(verified) if hidden and verified else _checkpoint_words(facts["checkpoint"], verified),
        )
    )
    if events:
        rows.append(("interrupted", interruption_words(facts["interruptions"])))
    if facts["last_cause"]:
        rows.append(("last cause", facts["last_cause"]))
    if facts["ended"]:
        rows.append(("ended", facts["ended"]))
    # A lead that is killed writes no end.
    elif facts["job_over"]:
        rows.append(("ended", f"without a word of its daemon; see verl-slurm logs {run.root}"))
    render.fields(rows, STATE_COLOURS)
    # The newest ones; --json has them all.
    if outages.each and num_interruptions:
        render.line()
        table = interruptions_table(outages.each[-num_interruptions:], now, render.width())
        render.plain_table(*table, right=("cost", "save", "queue", "start", "again"))
    if facts["steps"]:
        render.line()
        render.table(*steps_table(facts["steps"], render.width()), to_the_right=True)
    return ExitCode.OK


def _state_words(facts: dict[str, Any]) -> str:
    snapshot = facts["status"]
    state, since = snapshot.get("state"), ago(snapshot.get("updated"))
    if facts["job_over"] and not facts["outcome"] and state != "ended":
        return f"gone; {state} when its daemon last said so, {since}"  # a snapshot outlives its lead
    return f"{state}, as of {since}"


def _facts(run: RunPaths, events: "list[Event]") -> dict[str, Any]:
    """Returns all facts about a run, and the scheduler's present answer."""
    from verl_slurm.journal.events import Cause, Ended, Started, Submitted
    from verl_slurm.journal.folds.jobs import newest_job
    from verl_slurm.journal.status import read_status
    from verl_slurm.runs.glance import newest_to_see
    from verl_slurm.runs.liveness import job_state

    job = newest_job(events)
    state, detail, over = None, "", False
    if job is not None:
        try:
            answer = job_state(run, job)
            state, detail, over = answer.state, answer.detail, answer.over
        except VerlSlurmError as error:
            # Slurm's silence hides nothing of what the run's own files say.
            state, detail = "UNKNOWN", error.one_line()
    snapshot = read_status(run)
    newest = newest_to_see(run)
    causes = [event for event in events if isinstance(event, Cause)]
    # The newest of the three: an end is none any more once the run was submitted or started again.
    words = [event for event in events if isinstance(event, Ended | Started | Submitted)]
    word = words[-1] if words else None
    ended = word if isinstance(word, Ended) else None
    return {
        "run_dir": str(run.root),
        "job_id": None if job is None else job.job_id,
        "cluster": None if job is None else job.cluster,
        "job_state": state,
        "job_detail": detail,
        "job_over": over,
        "status": snapshot,
        "checkpoint": None
        if newest is None
        else {
            "name": newest.name,
            "step": newest.step,
            "safe_point": newest.safe_point,
            "created_utc": newest.created_utc,
            "num_bytes": newest.num_bytes,
        },
        "last_cause": story.tell(causes[-1]) if causes else None,
        "submitted": isinstance(word, Submitted),
        "outcome": ended.outcome if ended is not None and ended.is_final else None,
        "ended": None if ended is None else story.tell(ended),
    }


def _code_words(run: RunPaths, events: "list[Event]") -> list[str]:
    """Describes the code that the attempts run, and what the newest of them was warned of."""
    from verl_slurm.journal.events import Started, Submitted, Warned
    from verl_slurm.program.record import read_record

    try:
        record = read_record(run, to_look=True)
    # A file that cannot be read costs this line of the answer, and not the others.
    except (OSError, VerlSlurmError) as error:
        return [f"unknown: {error}"]
    lines = [] if record is None else record.lines()
    # Of the newest attempt: a later one may have found the former packages again.
    for event in reversed(events):
        if isinstance(event, Warned) and event.topic in ("code", "packages"):
            lines.append(f"WARNING, {event.topic}: {event.text}")
        if isinstance(event, Started | Submitted):
            break
    return lines


def _step_of(facts: dict[str, Any]) -> int:
    """Returns the completed steps. A start whose ranks have not reported yet has those that it resumes from."""
    snapshot, checkpoint = facts["status"], facts["checkpoint"]
    # Without a phase no rank has reported yet, and a new lead's snapshot may begin with step 0.
    if checkpoint is not None and not snapshot.get("phase"):
        return max(int(checkpoint["step"]), int(snapshot.get("step", 0)))
    return int(snapshot.get("step", 0))


def _reward_in_force(run: RunPaths, now: int) -> dict[str, Any] | None:
    """Returns the reward that scores the running step, since when, and the open part of a replacement. None: a
    guest's loop, whose reward is its own.

    Not for `list`: it needs the run's configuration, and to read that of a thousand runs takes many seconds.
    """
    from verl_slurm.config.load import load_resolved
    from verl_slurm.wire.reward_plan import read_reward_plan, read_reward_request

    try:
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


def _checkpoint_words(checkpoint: dict[str, Any] | None, verified: object) -> str:
    if checkpoint is None:
        return "none yet"
    size = checkpoint["num_bytes"] / 1e6
    # The newest checkpoint need not be the last one that was read back: a save may have come since.
    good = "verified by the daemon" if checkpoint["name"] == verified else "see verl-slurm verify"
    return f"{checkpoint['name']}, {size:.1f} MB, {ago(checkpoint['created_utc'])}, {good}"
