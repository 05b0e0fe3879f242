"""Submits through submitit. The job is the lead itself: what submitit has pickled for it is never read.

A submission runs in a process of its own (`python -m verl_slurm.submit.executor RUN slurm|local`): without the
variables of a job that we may be inside of, with umask 077, and in its own session.

The local controller runs the lead once and waits. Its time limit and its own requeue (exit code 144) are not used.
"""

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from verl_slurm.base.errors import NotFound, SlurmMissing
from verl_slurm.base.paths import RunPaths
from verl_slurm.checks.probe_command import run_to_end
from verl_slurm.config.load import load_own
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.files import read_history
from verl_slurm.runs.liveness import unknown_jobs
from verl_slurm.slurm.batch import awaiting, component_lines, sbatch_parameters, submission_environment
from verl_slurm.slurm.requeue_rules import is_answer
from verl_slurm.slurm.runner import Completed, slurm_words, waiting_for
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.submit.checks.slurm_answers import refusal
from verl_slurm.submit.submission_plan import Cluster, SubmissionPlan
from verl_slurm.wire.environment import UMASK_VARIABLE

_TIMEOUT_S = 120.0
_NO_LIMIT_MIN = 366 * 24 * 60
# The whole line, since a site's own words may name jobs, too; or, from a wrapper, the number and nothing else.
_QUEUED = re.compile(r"^Submitted batch job (\d{1,10})\b", re.MULTILINE | re.ASCII)
_QUEUED_LINE = re.compile(_QUEUED.pattern + r"(?: on cluster \S+)?", re.MULTILINE | re.ASCII)
_NUMBER_ALONE = re.compile(r"\A\s*(\d{1,10})(?:;\S*)?\s*\Z", re.ASCII)


class MayBeQueued(SlurmMissing):
    """What sbatch did is not known."""


class QueuedJob(NamedTuple):
    """A job that is queued, or started."""

    job_id: str
    """Slurm's, or the process id of submitit's local controller."""
    notes: tuple[str, ...] = ()
    """Words for the user, e.g. the site's."""


class _Answer(msgspec.Struct, frozen=True):
    """The child's answer, on its last line of standard output."""

    job_id: str = ""
    notes: tuple[str, ...] = ()
    error: str = ""
    refused: bool = False
    """Nothing is queued for certain."""


def render_script(plan: SubmissionPlan) -> str:
    """Returns the batch script that submitit would hand to sbatch, byte for byte. SlurmMissing: there is no srun."""
    executor = _slurm_executor(plan.config, RunPaths(plan.run_dir), avoids=plan.avoids)
    # Private to submitit, whose public `submit` writes the script and queues it at once.
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def local_command(plan: SubmissionPlan) -> str:
    """Returns the command that the local executor would start."""
    return shlex.join(_lead(RunPaths(plan.run_dir)))


def submit_job(plan: SubmissionPlan, after: str = "") -> QueuedJob:
    """Submits the job; `RUN/run.yaml` must exist.

    Args:
        after: id of a Slurm job that must have ended for good before this one starts; empty: none.

    Raises:
        SlurmRefused: sbatch refused; the error quotes it.
        MayBeQueued: no answer, or one that is not understood, and Slurm shows no job of the run.
    """
    paths = RunPaths(plan.run_dir)
    before = read_history(paths)
    command = [sys.executable, "-P", "-m", __name__, str(plan.run_dir), plan.cluster, after]
    command += plan.avoids
    with waiting_for("sbatch", _TIMEOUT_S) if plan.cluster == "slurm" else nullcontext():
        answer = _ask_child(command, submission_environment(os.environ, plan.config))
    if answer.job_id:
        return QueuedJob(answer.job_id, answer.notes)
    # Slurm knows whether a job has the script that was handed to it, whatever became of the answer.
    unanswered = ""
    try:
        if plan.cluster == "slurm" and (unknown := unknown_jobs(paths, before)):
            note = (
                f"sbatch's answer was not understood ({answer.error}); by its script the job is {unknown[-1]}"
            )
            return QueuedJob(unknown[-1], (note,))
    except (SlurmMissing, NotFound) as error:
        unanswered = f", and squeue: {error.one_line()}"
    if answer.refused:
        raise refusal(plan.config, answer.error)
    raise MayBeQueued(
        "the answer to the submission is not understood; a job may be queued",
        where=plan.run_dir,
        found=f"{answer.error}{unanswered}",
        expected="Submitted batch job NUMBER",
        remedy=f"`squeue --me --name={plan.config.name}` tells; the same submit again queues no second one",
    )


def _ask_child(command: list[str], environment: dict[str, str]) -> _Answer:
    with subprocess.Popen(
        command,
        # Without the variables of a job that this runs in: they would reach the new one.
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # The local controller is this child's child: it must not get the terminal's Ctrl-C or hang-up.
        start_new_session=True,
    ) as child:
        try:
            out, err = child.communicate(timeout=_TIMEOUT_S)
        except BaseException as error:
            # With its sbatch, which could queue the job after it has been looked for.
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()  # after a Ctrl-C, Popen does not
            if isinstance(error, subprocess.TimeoutExpired):
                return _Answer(error=f"nothing in {_TIMEOUT_S:.0f} s")
            raise
    try:
        # From the last line that begins an object: submitit may have printed before the answer.
        return msgspec.json.decode(out.rpartition(b"\n{")[2].join((b"{", b"")), type=_Answer)
    # No answer of ours: the child died before it could give one, and its last words say more.
    except msgspec.MsgspecError:
        words = slurm_words(err.decode(errors="replace"))
        return _Answer(error=words or f"submitit ended with exit code {child.returncode}")


def main(run_dir: str, cluster: Cluster, after: str, avoids: Sequence[str] = ()) -> int:
    """Runs as the child: submits and answers in one JSON line."""
    # submitit's files are pickles, which whoever unpickles them runs.
    os.environ[UMASK_VARIABLE] = f"{os.umask(0o077):03o}"  # the job inherits ours
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
        job = executor.submit(_not_called)
        answer = _Answer(job_id=str(job.job_id), notes=getattr(executor, "notes", ()))
    except _NotUnderstood as error:
        answer = _Answer(error=str(error))
    except Exception as error:  # noqa: BLE001 - whatever submitit raises is the answer
        answer = _Answer(error=slurm_words(str(error)) or type(error).__name__, refused=True)
    # A line of its own, whatever was printed before it without an end.
    os.write(answer_fd, b"\n" + msgspec.json.encode(answer))
    return 0


def _slurm_executor(config: RunConfig, paths: RunPaths, after: str = "", avoids: Sequence[str] = ()) -> Any:
    from submitit import SlurmExecutor

    class OwnSlurmExecutor(SlurmExecutor):
        # In the place of submitit's, which unpickles a file. `exec` makes Python the batch process: Slurm sends `B:`
        # signals to that one, and bash would hold a trap back.
        _submitit_command_str = f"exec {shlex.join(_lead(paths))}"

        notes: tuple[str, ...] = ()

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return with_components(super()._make_submission_file_text(command, uid), config)

        def _submit_command(self, command: str) -> Any:
            # submitit's own drops what sbatch says beside its answer, and takes the first `job N` for the number.
            script = paths.logs / f".submission_file_{uuid.uuid4().hex}.sh"
            # As paths are encoded: RUN may have a name that this locale's encoding lacks.
            script.write_bytes(os.fsencode(self._make_submission_file_text(command, "")))
            number, self.notes = _sbatch(script)
            job = self.job_class(folder=self.folder, job_id=number, tasks=list(range(self._num_tasks())))
            job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
            return job

    try:
        executor = OwnSlurmExecutor(folder=paths.logs)
    except RuntimeError as error:
        raise SlurmMissing(
            "Slurm's commands are not here", found=error, remedy="load Slurm's module, or use --cluster local"
        ) from error
    # Asked, since an sbatch that does not know the option refuses the job.
    expedite = config.slurm.expedite == "auto" and asyncio.run(SlurmClient().offers_expedite())
    # submitit writes `--wckey=submitit` by itself, which a Slurm that enforces wckeys refuses.
    waits = awaiting(sys.executable, paths)
    parameters = sbatch_parameters(config, expedite=expedite, after=after, avoids=avoids, waits=waits)
    executor.update_parameters(**parameters, wckey=None)
    return executor


class _NotUnderstood(Exception):
    """sbatch was run, and whether it queued the job is not known."""


def _sbatch(script: Path) -> tuple[str, tuple[str, ...]]:
    """Queues a batch script; returns the job's number, and what sbatch said beside it.

    Raises:
        RuntimeError: it refused, in these words.
        _NotUnderstood: neither.
    """
    # The parent has the patience, and ends this process with its sbatch.
    done = run_to_end([shutil.which("sbatch") or "sbatch", str(script)], None)
    said = slurm_words(f"{done.err}\n{done.out}") or "not a word"
    said += f" (exit code {done.exit_code})" * bool(done.exit_code)
    queued = _QUEUED.findall(done.out) or (not done.exit_code and _NUMBER_ALONE.findall(done.out))
    if queued and len(set(queued)) == 1:
        words = slurm_words(f"{done.err}\n{_NUMBER_ALONE.sub('', _QUEUED_LINE.sub('', done.out))}")
        return queued[0], (f"sbatch says: {words}",) if words else ()
    # By Slurm's own sentence, which is the last.
    last = Completed(
        exit_code=done.exit_code or 0, stdout="", stderr=done.err.strip().rpartition("\n")[2], seconds=0.0
    )
    if done.exit_code and not queued and is_answer(last):
        raise RuntimeError(said)
    raise _NotUnderstood(said)


def with_components(script: str, config: RunConfig) -> str:
    """Returns submitit's batch script with the further components of a heterogeneous job."""
    lines = script.split("\n")
    ours = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    requeue = next((line for line in lines if line.startswith("#SBATCH --requeue")), "#SBATCH --requeue")
    # submitit has no such components.
    more = component_lines(config, requeue.removeprefix("#SBATCH "))
    return "\n".join([*lines[: ours[-1] + 1], *more, *lines[ours[-1] + 1 :]])


def _local_executor(config: RunConfig, paths: RunPaths) -> Any:
    from submitit import LocalExecutor

    class OwnLocalExecutor(LocalExecutor):
        # Without `exec`: submitit's local controller starts it without a shell, and there is no such program.
        _submitit_command_str = shlex.join(_lead(paths))

    _stay_private_to_this_process()
    executor = OwnLocalExecutor(folder=paths.logs)
    # The lead starts its next attempt itself, so the controller gets no time limit that could end it and no warning to
    # send.
    executor.update_parameters(
        timeout_min=_NO_LIMIT_MIN,
        signal_delay_s=0,
        gpus_per_node=config.slurm.gpus_per_node,
        stderr_to_stdout=True,
    )
    return executor


def _lead(paths: RunPaths) -> list[str]:
    return [sys.executable, "-P", "-m", "verl_slurm_daemon", "lead", "--run", str(paths.root)]


def _not_called() -> None:
    """What submitit pickles: it wants a function."""


def _stay_private_to_this_process() -> None:
    # Off the pipe that the parent reads to its end: the controller outlives this process.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)


if __name__ == "__main__":
    raise SystemExit(
        main(
            str(Path(sys.argv[1])), "slurm" if sys.argv[2] == "slurm" else "local", sys.argv[3], sys.argv[4:]
        )
    )
