"""Reads the facts about a run's jobs from its journal and its status file."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base.bounded import SMALL, TooMuch, read_regular
from verl_slurm.base.errors import NotFound, PermissionRefused, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import read_copy
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.config.load import load_resolved, no_run
from verl_slurm.journal.events import Cluster, Ended
from verl_slurm.journal.files import read_history
from verl_slurm.journal.history import History, Submission
from verl_slurm.journal.status import read_status
from verl_slurm.runtime_state.segment import HEAD_BYTES


def require_run(paths: RunPaths) -> RunPaths:
    """Refuses a directory that is not a run: NotFound, it has no run.yaml."""
    if not paths.run_yaml.is_file():
        load_resolved(paths.run_yaml)  # raises if it is not
    return paths


def require_traces(paths: RunPaths) -> RunPaths:
    """Raises NotFound if no file of a run is left in a directory, PermissionRefused if it is closed to us."""
    if paths.root.is_dir() and not os.access(paths.root, os.R_OK | os.X_OK):
        raise PermissionRefused("the run cannot be read", where=paths.root, remedy="ask its owner for access")
    traces = (paths.run_yaml, paths.events, paths.steps, paths.status, paths.checkpoints)
    if not any(os.path.lexists(trace) for trace in traces):
        raise no_run(paths.run_yaml)
    return paths


def has_begun(paths: RunPaths) -> bool:
    """Returns whether the run has something that another configuration would spoil: a checkpoint, or rollouts."""
    # One that is damaged or set aside counts, too.
    kinds = {info.kind for info in list_checkpoints(paths) if not info.name.startswith(".")}
    return bool(kinds & {"committed", "torn", "quarantined"}) or any(
        segment.stat().st_size > HEAD_BYTES for segment in paths.ledger.glob("*.ledger")
    )


def ended_well(paths: RunPaths) -> bool:
    """Returns whether the newest word of the run's life is an end with exit code 0."""
    word = read_history(paths).word
    return isinstance(word, Ended) and word.exit_code == ExitCode.OK


def has_ledger(paths: RunPaths) -> bool:
    """Returns whether the run's loop keeps finished rollouts; a loop that is not ours need not."""
    return any(paths.ledger.glob("*.ledger"))


def steps_done(paths: RunPaths) -> int:
    """Returns the steps that are done or begun: the run cannot end before them any more."""
    done = max(int(read_status(paths).get("step") or 0), 0)
    for info in list_checkpoints(paths):
        if info.kind == "committed":
            # A trainer in the middle of a step never stops at that step's beginning.
            done = max(done, info.step + (1 if info.safe_point else 0))
    return done


# The batch script of a job, as submitit names it in RUN/logs.
_SCRIPT = re.compile(r"(\d{1,10})_submission\.sh", re.ASCII)


def job_by_files(paths: RunPaths) -> Submission | None:
    """Returns the newest job that RUN/attempt or RUN/logs names, for a run whose journal was emptied; or None."""
    found: list[tuple[float, Submission]] = []
    with suppress(OSError, VerlSlurmError):
        if (owner := read_copy(paths)) is not None and owner.cluster in ("slurm", "local"):
            cluster: Cluster = "slurm" if owner.cluster == "slurm" else "local"
            job = Submission(job_id=owner.job_id, cluster=cluster, host=owner.host)
            found.append((paths.attempt.stat().st_mtime, job))
    with suppress(OSError):
        # A local job has a script without lines for sbatch. It is found by its attempt.
        found += [
            (script.lstat().st_mtime, Submission(job_id=match[1], cluster="slurm"))
            for script in paths.logs.iterdir()
            if (match := _SCRIPT.fullmatch(script.name)) and _is_slurms(script)
        ]
    return max(found, key=lambda one: one[0])[1] if found else None


def _is_slurms(script: Path) -> bool:
    try:
        return b"#SBATCH" in read_regular(script, SMALL)
    except (OSError, TooMuch):
        return False


def last_job(paths: RunPaths) -> Submission:
    """Returns the newest job of the run, whoever submitted it; NotFound: there was none."""
    history = read_history(paths)
    found = history.job or job_by_files(paths)
    if found is None:
        raise NotFound(
            "the run has no job yet",
            where=paths.root,
            remedy=f"verl-slurm submit {shell_word(paths.root)}",
        )
    return completed(found, history, read_status(paths))


def lead_log(paths: RunPaths) -> Path:
    """Returns where the newest job's lead writes; NotFound: there was none."""
    job_id = last_job(paths).job_id  # from the journal: in a run that was handed over it may name any path
    return paths.logs / f"{job_id.replace('/', '_')}_0_log.out"


def completed(job: Submission, history: History, status: Mapping[str, Any]) -> Submission:
    """Returns the job with a cancel of it, and its Slurm cluster's name, which may be in the snapshot alone."""
    told = status if status.get("job_id") == job.job_id else {}
    return msgspec.structs.replace(
        job,
        is_cancelled=history.is_cancelled,
        slurm=job.slurm or str(told.get("slurm") or ""),
        # The oldest lines of a long journal are not read.
        requeues=max(job.requeues, told.get("requeues", -1)),
    )
