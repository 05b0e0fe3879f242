"""`verl-slurm cancel` and `requeue`: a user's requests for a run's job."""

import click

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.options import RUN, exits, json_option
from verl_slurm.cli.show import render
from verl_slurm.runs.requests import cancel_run, requeue_run
from verl_slurm.slurm.runner import telling

_EXITS = exits(ExitCode.NO_SLURM, ExitCode.SLURM_REFUSED, ExitCode.NOT_FOUND)


@click.command(epilog=_EXITS)
@click.argument("run", type=RUN)
@json_option
def cancel(run: RunPaths, as_json: bool) -> None:
    """End the job of RUN for good.

    It is `scancel`: the daemon has Slurm's KillWait to save, and never requeues a job that its user cancelled.
    `verl-slurm submit RUN` starts it again, from the newest checkpoint that verifies.
    """
    with telling(render.warning):
        job_id = cancel_run(run)
    value = {"run_dir": str(run.root), "job_id": job_id, "result": "cancelled"}
    render.answer(value, f"job {job_id} is being cancelled; it will not be requeued", as_json=as_json)


@click.command(epilog=_EXITS)
@click.argument("run", type=RUN)
@click.option(
    "--now", "at_once", is_flag=True, help="Have Slurm do it at once: what saves has only KillWait."
)
@json_option
def requeue(run: RunPaths, at_once: bool, as_json: bool) -> None:
    """Save, end the running job of RUN, and have it start again a few seconds later.

    For instance to leave a node that is to be repaired. The daemon saves with all the time that it needs, reads the
    checkpoint back, and asks Slurm for the requeue itself. If the save fails, the ranks train on, and `verl-slurm
    status RUN` says so. With --now it is `scontrol requeue`, for a daemon that does not answer: the ranks are ended
    after Slurm's KillWait, saved or not. A job that is over is started again by `verl-slurm submit RUN`.
    """
    with telling(render.warning):
        job_id, detail = requeue_run(run, at_once=at_once)
    value = {"run_dir": str(run.root), "job_id": job_id, "result": "requeued"}
    render.answer(value, f"job {job_id} is being requeued: {detail}", as_json=as_json)
