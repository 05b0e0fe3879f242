"""`verl-slurm status`: where one run stands, and what it has gone through."""

from typing import Any

import click

from verl_slurm.cli import render, story
from verl_slurm.cli.options import RUN, exits, json_option
from verl_slurm.cli.spans import ago
from verl_slurm.errors import NotFound, VerlSlurmError
from verl_slurm.exit_codes import ExitCode
from verl_slurm.paths import RunPaths

__all__ = ["status"]


@click.command(epilog=exits(ExitCode.NOT_FOUND))
@click.argument("run", type=RUN)
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(min=0, max=1000),
    default=5,
    show_default=True,
    help="How many of the last steps are shown, 0: none.",
)
@json_option
def status(run: RunPaths, num_steps: int, as_json: bool) -> int:
    """Where RUN stands: its job, step, last good checkpoint, restarts, why it last stopped, and its last steps.

    RUN is a run directory, as `submit` printed it. The table has a line for each of the last steps; with --json, a
    row of `steps` has every number there is of a step: rewards, losses, KL, gradients, learning rates, those of an
    evaluation (`eval/...`), and seconds, tokens per second and memory.
    """
    from verl_slurm.cli.steps import steps_table
    from verl_slurm.step_log import last_steps

    facts = _facts(run, ask=True)
    facts["reward"] = _reward_in_force(run, _step_of(facts))
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
        if facts["job_over"] and facts["outcome"]:
            state = facts["outcome"]  # a scheduler forgets its jobs, the journal does not
        rows.append(("job", f"{facts['job_id']} ({facts['cluster']}): {state}"))
    if snapshot:
        rows.append(("state", f"{snapshot.get('state')}, as of {ago(snapshot.get('updated'))}"))
        rows.append(("training", story.progress(snapshot)))
        counts = (snapshot.get("epoch"), snapshot.get("restarts"), snapshot.get("generation"))
        rows.append(("starts", "epoch {}, {} requeues, generation {}".format(*counts)))
    rows.append(("reward", _reward_words(facts["reward"])))
    rows.append(("checkpoint", _checkpoint_words(facts["checkpoint"], snapshot.get("last_checkpoint"))))
    if facts["last_cause"]:
        rows.append(("last cause", facts["last_cause"]))
    if facts["ended"]:
        rows.append(("ended", facts["ended"]))
    elif facts["job_over"]:
        rows.append(("ended", f"without a word of its daemon; see verl-slurm logs {run.root}"))
    render.fields(rows)
    if facts["steps"]:
        render.line()
        render.table(*steps_table(facts["steps"], render.width()), to_the_right=True)
    return ExitCode.OK


def _facts(run: RunPaths, *, ask: bool) -> dict[str, Any]:
    """All that is known of a run; `ask`: also what the scheduler says now."""
    from verl_slurm.checkpoint.catalog import list_checkpoints
    from verl_slurm.events import read_events
    from verl_slurm.snapshot import read_status
    from verl_slurm.submit.liveness import job_state
    from verl_slurm.submit.record import last_job

    events = read_events(run)
    try:
        job = last_job(run)
    except NotFound:
        job = None
    state, detail, over = None, "", False
    if ask and job is not None:
        try:
            answer = job_state(run, job)
            state, detail, over = answer.state, answer.detail, answer.over
        except VerlSlurmError as error:
            state, detail = "UNKNOWN", error.one_line()
    snapshot = read_status(run)
    committed = [info for info in list_checkpoints(run) if info.kind == "committed"]
    causes = [event for event in events if event["event"] == "cause"]
    ends = [event for event in events if event["event"] in ("ended", "started", "submitted")]
    return {
        "run_dir": str(run.root),
        "job_id": None if job is None else job.job_id,
        "cluster": None if job is None else job.cluster,
        "job_state": state,
        "job_detail": detail,
        "job_over": over,
        "status": snapshot,
        "checkpoint": None
        if not committed
        else {
            "name": committed[0].name,
            "step": committed[0].step,
            "safe_point": committed[0].safe_point,
            "created_utc": committed[0].created_utc,
            "num_bytes": committed[0].num_bytes,
        },
        "last_cause": story.tell(causes[-1]) if causes else None,
        "submitted": bool(ends) and ends[-1]["event"] == "submitted",
        "outcome": story.outcome(ends[-1]) if ends else None,
        "ended": story.tell(ends[-1]) if ends and ends[-1]["event"] == "ended" else None,
    }


def _step_of(facts: dict[str, Any]) -> object:
    """Whole steps done. Of a start whose ranks have said nothing yet, what it resumes from has them."""
    snapshot, checkpoint = facts["status"], facts["checkpoint"]
    if checkpoint is not None and not snapshot.get("phase"):
        return checkpoint["step"]
    return snapshot.get("step", 0)


def _reward_in_force(run: RunPaths, step: object) -> dict[str, Any]:
    """What scores the step that runs, since when, and what is still open of a replacement.

    Not for `list`: it needs the run's configuration, and to read that of a thousand runs takes many seconds.
    """
    from verl_slurm.config.load import load_resolved
    from verl_slurm.reward_plan import read_reward_plan, read_reward_request

    try:
        first = load_resolved(run.run_yaml).model.reward
        plan, wish = read_reward_plan(run), read_reward_request(run)
    except (OSError, VerlSlurmError) as error:
        return {"reward": None, "problem": str(error)}
    now = step if isinstance(step, int) else 0
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
    good = "verified by the daemon" if checkpoint["name"] == verified else "see verl-slurm verify"
    return f"{checkpoint['name']}, {size:.1f} MB, {ago(checkpoint['created_utc'])}, {good}"
