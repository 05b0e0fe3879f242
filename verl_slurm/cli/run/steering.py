"""`verl-slurm cancel`, `requeue` and `update-reward`: what a user asks of a run that goes on."""

import os
from pathlib import Path

import click

from verl_slurm.base.errors import SlurmMissing, SlurmRefused
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.cli.command_options import DAMAGED_RUN, PLACE, RUN, Whole, command, flag, option
from verl_slurm.cli.show import render
from verl_slurm.config.load import load_resolved
from verl_slurm.journal.events import RewardAsked
from verl_slurm.runs.requests import ask_for_save, cancel_run, requeue_run, unwritten
from verl_slurm.slurm.runner import telling
from verl_slurm.submit.checks.model_and_reward import check_reward, refuse_guests
from verl_slurm.submit.relative_paths import absolute_reward
from verl_slurm.wire.reward_plan import ask_for_reward


@command("NO_SLURM SLURM_REFUSED NOT_FOUND")
@click.argument("run", type=DAMAGED_RUN)
def cancel(run: RunPaths, as_json: bool) -> None:
    """End the job of RUN for good.

    It is `scancel`: the daemon has Slurm's KillWait to save, and never requeues a job that its user cancelled.
    `verl-slurm submit RUN` starts it again, from the newest checkpoint that verifies.
    """
    unknown = (
        f"the job may go on; `verl-slurm status {shell_word(run.root)}` tells, "
        f"`verl-slurm cancel {shell_word(run.root)}` ends it"
    )
    with telling(render.warning), render.told_if_interrupted(unknown):
        job_id = cancel_run(run)
    value = {"run_dir": str(run.root), "job_id": job_id, "result": "cancelled"}
    render.answer(value, f"job {job_id} is being cancelled; it will not be requeued", as_json=as_json)


@command("NO_SLURM SLURM_REFUSED NOT_FOUND")
@click.argument("run", type=RUN)
@flag("--now", "Have Slurm do it at once: what saves has only KillWait (without Slurm, 30 s).", "at_once")
def requeue(run: RunPaths, at_once: bool, as_json: bool) -> None:
    """Save, end the running job of RUN, and have it start again a few seconds later.

    For instance to leave a node that is to be repaired. The daemon saves with all the time that it needs, reads the
    checkpoint back, and asks Slurm for the requeue itself. If the save fails, the ranks train on, and `verl-slurm
    status RUN` says so. With --now it is `scontrol requeue`, for a daemon that does not answer: the ranks are ended
    after Slurm's KillWait, saved or not. A job that is over is started again by `verl-slurm submit RUN`.
    """
    unknown = f"the job may be requeued all the same; `verl-slurm status {shell_word(run.root)}` tells"
    with telling(render.warning), render.told_if_interrupted(unknown):
        job_id, detail = requeue_run(run, at_once=at_once)
    value = {"run_dir": str(run.root), "job_id": job_id, "result": "requeued"}
    render.answer(value, f"job {job_id} is being requeued: {detail}", as_json=as_json)


_LATER = "it counts from the next start on"
_UNTOLD = "it is written down, and taken at the next start, or after the next save that a person asks for"


@command("CONFIG DATA CORRUPT NOT_FOUND", "update-reward")
@option("--checkpoint", PLACE, "The run, or a checkpoint in it.", "place", required=True)
@click.option("--new-model", "new", metavar="NEW", required=True, help="The reward that follows; see above.")
@option(
    "--warm-start-steps",
    Whole(0, 1_000_000),
    "Steps over which its scores come from the former one's scale to their own. 0: at once.",
    default=10,
)
def update_reward(place: Path, new: str, warm_start_steps: int, as_json: bool) -> None:
    """Have the run of --checkpoint score with the reward NEW from the end of a step on, without stopping it.

    \b
    NEW is what model.reward may be, or a directory:
      classifier:DIR            a Hugging Face sequence classifier with one label
      python:FILE.py:FUNCTION   a function of (prompts, responses, answers) that returns one float each
      python:MODULE:FUNCTION    the same, of a module that the job can import
      rule:NAME                 a rule of verl-slurm

    The run saves, loads NEW beside the present reward and has it score the last responses. Only then the present
    one is let go; if anything fails it stays, and `verl-slurm status RUN` says why. The step of the replacement is
    written down first, so a run that is interrupted replaces its reward at the same step again.

    A run without a living job gets NEW at its next start. So does one whose job could not be told, because Slurm
    refused that or gave no answer: the wish is written down by then, a warning says so, and the exit code is 0.
    """
    run = RUN.convert(_run_of(place.resolve()), None, None)
    refuse_guests(run)
    here = Path.cwd()
    if ":" not in new and (here / os.path.expanduser(new)).is_dir():
        new = f"classifier:{new}"
    # The job runs elsewhere: a relative path would mean another file there.
    reward = absolute_reward(new, here)
    for note in check_reward(reward, load_resolved(run.run_yaml)):
        render.warning(note)
    # Written down before the job is told: a signal that gets lost then costs time and not the wish.
    request = ask_for_reward(run, reward, warm_start_steps)
    if (error := unwritten(run, RewardAsked(reward, request.number, warm_start_steps))) is not None:
        render.warning(f"{reward} is asked for, and the journal could not be told: {error}")
    problem = None
    try:
        # By the signal with which an operator asks for a save.
        with render.told_if_interrupted(f"{reward} is asked for; {_UNTOLD}"):
            is_told = ask_for_save(run)
        when = "the run saves, tries it, and takes it at the end of a step" if is_told else _LATER
    # No failure: the wish counts from the next start on, whether or not the job has heard of it.
    except (SlurmMissing, SlurmRefused) as error:
        when, problem = _UNTOLD, error.one_line()
        render.warning(f"the run's job could not be told: {problem}")
    said = {"run_dir": str(run.root), "request": request.number, "reward": reward, "when": when}
    said |= {"warm_start_steps": warm_start_steps, "problem": problem}
    text = f"{reward} is asked for: {when}; follow it with verl-slurm status {shell_word(run.root)}"
    render.answer(said, text, as_json=as_json)


def _run_of(place: Path) -> Path:
    # For a checkpoint in RUN/checkpoints; any other place as it is.
    return place.parents[1] if CHECKPOINT_NAME.fullmatch(place.name) and len(place.parents) > 1 else place
