"""Submits through submitit, whose job `start_job` then becomes.

A submission runs in a process of its own (`python -m verl_slurm.submit.executor RUN slurm|local`), for three reasons.
Its environment must lack the variables of a job that we may be inside of. Its umask must be 077, because submitit's
files are pickles. And the local executor needs a session of its own. submitit's local controller is a child that must
outlive the terminal, must not get its Ctrl-C and must not hold our standard output open.

The local controller runs the lead once and waits. Its time limit and its own requeue (exit code 144) are not used:
the lead starts its next attempt itself.
"""

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base.errors import SlurmMissing
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import load_own
from verl_slurm.config.schema import RunConfig
from verl_slurm.slurm.batch import component_lines, sbatch_parameters, submission_environment
from verl_slurm.slurm.client import SlurmClient
from verl_slurm.submit.checks.slurm_verdict import refusal
from verl_slurm.submit.entry import BecomeLead
from verl_slurm.submit.plan import Cluster, SubmissionPlan

__all__ = ["local_command", "main", "render_script", "submit_job", "with_components"]

_ENTRY = "verl_slurm.submit.start_job"
_TIMEOUT_S = 120.0
_NO_LIMIT_MIN = 366 * 24 * 60


class _Answer(msgspec.Struct, frozen=True):
    """The child's answer, on its last line of standard output."""

    job_id: str = ""
    error: str = ""


def render_script(plan: SubmissionPlan) -> str:
    """Returns the batch script that submitit would hand to sbatch, byte for byte. Writes nothing.

    Raises:
        SlurmMissing: submitit finds no srun.
    """
    executor = _slurm_executor(plan.config, RunPaths(plan.run_dir), avoids=plan.avoids)
    # Private to submitit, whose public `submit` writes the script and queues it at once.
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def local_command(plan: SubmissionPlan) -> str:
    """Returns the command that the local executor would start."""
    folder = RunPaths(plan.run_dir).logs
    return shlex.join([sys.executable, "-P", "-u", "-m", _ENTRY, str(folder)])


def submit_job(plan: SubmissionPlan, after: str = "") -> str:
    """Submits the job; `RUN/run.yaml` must exist.

    Args:
        after: id of a Slurm job that must have ended for good before this one starts; empty: none.

    Returns:
        The job id: Slurm's, or the process id of submitit's local controller.

    Raises:
        SlurmRefused: sbatch refused; the error quotes it.
        SlurmMissing: no answer in time.
    """
    # Without the variables of a job that this runs in: they would reach the new one.
    environment = submission_environment(os.environ, plan.config)
    command = [sys.executable, "-P", "-m", __name__, str(plan.run_dir), plan.cluster, after]
    command += plan.avoids
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            # The local controller is this child's child: it must not get the terminal's Ctrl-C or hang-up.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise SlurmMissing(
            "sbatch did not answer",
            found=f"nothing in {_TIMEOUT_S:.0f} s",
            remedy="see `scontrol ping`, and with `squeue --me` whether the job was queued all the same",
        ) from None
    try:
        # From the last line that begins an object: submitit may have printed before the answer.
        answer = msgspec.json.decode(done.stdout.rpartition(b"\n{")[2].join((b"{", b"")), type=_Answer)
    # No answer of ours: the child died before it could give one, and its last words say more.
    except msgspec.MsgspecError:
        answer = _Answer(error=_last_line(done.stderr) or f"submitit ended with exit code {done.returncode}")
    if answer.error or not answer.job_id:
        raise refusal(plan.config, answer.error)
    return answer.job_id


def main(run_dir: str, cluster: Cluster, after: str, avoids: Sequence[str] = ()) -> int:
    """Runs as the child: submits and answers in one JSON line."""
    # submitit's files are pickles, which whoever unpickles them runs.
    os.umask(0o077)
    # The local controller inherits 1 and 2; the answer goes out through a descriptor that it does not get.
    answer_fd = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    paths = RunPaths(run_dir)
    # Asks who owns it: the job runs the programs that it names.
    config = load_own(paths.run_yaml)
    try:
        executor = (
            _slurm_executor(config, paths, after, avoids)
            if cluster == "slurm"
            else _local_executor(config, paths)
        )
        job = executor.submit(BecomeLead(run_dir))
        answer = _Answer(job_id=str(job.job_id))
    except Exception as error:  # noqa: BLE001 - whatever submitit raises is the answer
        answer = _Answer(error=_sbatch_words(error))
    # A line of its own, whatever was printed before it without an end.
    os.write(answer_fd, b"\n" + msgspec.json.encode(answer))
    return 0


def _slurm_executor(config: RunConfig, paths: RunPaths, after: str = "", avoids: Sequence[str] = ()) -> Any:
    from submitit import SlurmExecutor

    class OwnSlurmExecutor(SlurmExecutor):
        # Our entry asks who owns the pickle before submitit opens it (`start_job`).
        _submitit_command_str = property(_entry_of)

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return with_components(super()._make_submission_file_text(command, uid), config)

    try:
        # `exec` makes Python the batch process: Slurm sends `B:` signals to that one, and bash would hold a trap back.
        executor = OwnSlurmExecutor(folder=paths.logs, python=f"exec {shlex.quote(sys.executable)} -P")
    except RuntimeError as error:
        raise SlurmMissing(
            "Slurm's commands are not here", found=error, remedy="load Slurm's module, or use --cluster local"
        ) from error
    # Asked, since an sbatch that does not know the option refuses the job.
    expedite = config.slurm.expedite == "auto" and asyncio.run(SlurmClient().offers_expedite())
    executor.update_parameters(**sbatch_parameters(config, expedite=expedite, after=after, avoids=avoids))
    return executor


def with_components(script: str, config: RunConfig) -> str:
    """Returns submitit's batch script with the further components of a heterogeneous job, which submitit has not."""
    lines = script.split("\n")
    ours = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    requeue = next((line for line in lines if line.startswith("#SBATCH --requeue")), "#SBATCH --requeue")
    more = component_lines(config, requeue.removeprefix("#SBATCH "))
    return "\n".join([*lines[: ours[-1] + 1], *more, *lines[ours[-1] + 1 :]])


def _local_executor(config: RunConfig, paths: RunPaths) -> Any:
    from submitit import LocalExecutor

    class OwnLocalExecutor(LocalExecutor):
        _submitit_command_str = property(_entry_of)

    _stay_private_to_this_process()
    # Without `exec`: submitit's local controller starts the command without a shell, and there is no such program.
    executor = OwnLocalExecutor(folder=paths.logs, python=f"{shlex.quote(sys.executable)} -P")
    # The lead starts its next attempt itself, so the controller gets no time limit that could end it and no warning to
    # send.
    executor.update_parameters(
        timeout_min=_NO_LIMIT_MIN,
        signal_delay_s=0,
        gpus_per_node=config.slurm.gpus_per_node,
        stderr_to_stdout=True,
    )
    return executor


def _entry_of(executor: Any) -> str:
    """Returns submitit's own command, with our entry in place of its module."""
    return f"{executor.python} -u -m {_ENTRY} {shlex.quote(str(executor.folder))}"


def _stay_private_to_this_process() -> None:
    """Keeps the controller's output off the pipe that the parent reads to its end."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)


def _sbatch_words(error: Exception) -> str:
    """Shortens `sbatch: error: Batch job submission failed: Invalid partition name specified` to its last part."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return text.removeprefix("sbatch: error: ")


def _last_line(raw: bytes) -> str:
    lines = raw.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


if __name__ == "__main__":
    raise SystemExit(
        main(
            str(Path(sys.argv[1])), "slurm" if sys.argv[2] == "slurm" else "local", sys.argv[3], sys.argv[4:]
        )
    )
