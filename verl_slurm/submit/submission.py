"""The order of a submission: check everything, make, queue. Whatever fails leaves nothing half-made.

```
plan_submission   config → paths → run directory → model, data → Slurm → an existing run; makes nothing
carry_out         built-ins → fingerprint → RUN/, run.yaml → sbatch → `submitted`; undone on failure
```
"""

import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from verl_slurm.checkpoint import fingerprint as prints
from verl_slurm.config.load import dump, load, load_resolved
from verl_slurm.errors import DatasetDrift, Fenced, NotFound
from verl_slurm.events import append_event
from verl_slurm.files import private_dir, write_file
from verl_slurm.paths import RunPaths
from verl_slurm.submit.executor import submit_job
from verl_slurm.submit.inputs import absolute, build_builtins, built_before
from verl_slurm.submit.liveness import job_state, settle
from verl_slurm.submit.plan import SubmissionPlan, refuse_changes
from verl_slurm.submit.preflight import check_inputs, check_run_dir, check_slurm, choose_cluster
from verl_slurm.submit.record import has_ended, last_job

__all__ = ["Submitted", "carry_out", "plan_submission"]

Confirm = Callable[[prints.Drift], bool]


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Called by: cli.submit.
    """

    run_dir: str
    cluster: str
    job_id: str | None
    """None: prepared only."""
    new_run: bool
    changed: tuple[str, ...] = ()
    """Keys that differ from the run's former submission."""
    notes: tuple[str, ...] = ()


def plan_submission(
    source: Path,
    overrides: list[str],
    *,
    cluster: Literal["auto", "slurm", "local"] = "auto",
    ask_slurm: bool = True,
    base: Path | None = None,
) -> SubmissionPlan:
    """Check all that can be checked without making anything.

    Args:
        source: a YAML file, or a run directory (then its run.yaml: the same run again).
        overrides: `key=value` words.
        cluster: `auto` is Slurm where its commands are.
        ask_slurm: False: for a run that is only prepared.
        base: relative paths are relative to it; default: the working directory.

    Raises:
        ConfigError, DataError, PermissionRefused, SlurmMissing, SlurmRefused: what is wrong.
        Fenced: a job of this run is queued or running.
    """
    if source.is_dir():
        source = source / "run.yaml"
    config = absolute(load(source, overrides), base or Path.cwd())
    paths = RunPaths(config.run_dir)
    check_run_dir(paths.root)
    check_inputs(config)
    chosen, note = choose_cluster(cluster)
    if chosen == "slurm" and ask_slurm:
        check_slurm(config)
    new_run = not paths.run_yaml.exists()
    if not new_run:
        old = load_resolved(paths.run_yaml)
        config = built_before(config, old)
        refuse_changes(old, config, paths.root)
        _refuse_living(paths)
    return SubmissionPlan(
        config=config,
        run_dir=paths.root,
        cluster=chosen,
        new_run=new_run,
        notes=(note,) if note else (),
    )


def carry_out(
    plan: SubmissionPlan, *, prepare_only: bool = False, confirm_drift: Confirm | None = None
) -> Submitted:
    """Make the run directory and queue the job.

    Args:
        plan: from `plan_submission`.
        prepare_only: make everything, queue nothing (for `sbatch/two_nodes.sbatch`).
        confirm_drift: `--force-resume`: asked when the data has changed; None: refuse.

    Raises:
        DatasetDrift: the data has changed and nobody confirmed.
        SlurmRefused, SlurmMissing: sbatch. Everything made so far is removed again.
    """
    config = build_builtins(plan.config)
    paths = RunPaths(plan.run_dir)
    changed = [] if plan.new_run else refuse_changes(load_resolved(paths.run_yaml), config, paths.root)
    seen = prints.fingerprint(Path(config.data.root))
    drift = _drift(paths, seen)
    if drift is not None and (confirm_drift is None or not confirm_drift(drift)):
        raise DatasetDrift(
            "the data has changed since the run started",
            where=config.data.root,
            found=drift.one_line(),
            expected="the files of the first start",
            remedy="restore them, start a new run, or accept the change with --force-resume",
        )
    job_id: str | None = None
    with ExitStack() as held:
        with ExitStack() as undo:
            _make_root(undo, paths.root)
            held.enter_context(_only_submitter(paths))
            if paths.run_yaml.exists() is plan.new_run:
                raise Fenced(
                    "another submit was faster", where=paths.root, remedy="submit again to see its run"
                )
            undo.callback(_remove_new, paths.logs, _names(paths.logs))
            undo.callback(_remove_new, paths.root, _names(paths.root))
            private_dir(paths.logs)
            private_dir(paths.control)
            _replace(undo, paths.run_yaml, dump(config))
            if config.checkpoint.resume_from != "auto":
                undo.callback(paths.resume_once.unlink, missing_ok=True)
                write_file(paths.resume_once, b"")
            if drift is not None or not paths.fingerprint.exists():
                _keep(undo, paths.fingerprint)
                prints.write(paths, seen)
            if not prepare_only:
                job_id = submit_job(msgspec.structs.replace(plan, config=config))
            undo.pop_all()  # a job exists: from here on nothing is undone
        if drift is not None:
            _record_drift(paths, drift)
        if job_id is not None:
            append_event(paths, "submitted", job_id=job_id, cluster=plan.cluster, host=socket.gethostname())
    return Submitted(
        run_dir=str(paths.root),
        cluster=plan.cluster,
        job_id=job_id,
        new_run=plan.new_run,
        changed=tuple(changed),
        notes=plan.notes,
    )


def _refuse_living(paths: RunPaths) -> None:
    try:
        job = last_job(paths)
    except NotFound:
        return
    ended = has_ended(paths, job)
    if ended:
        settle(paths, job)
    state = job_state(paths, job)
    # Slurm takes a moment to notice an end that the daemon has written down already. But a job that waits
    # again after its end was requeued by somebody.
    if not state.over and not (ended and state.state != "PENDING"):
        raise Fenced(
            "the run has a job already",
            where=paths.root,
            found=f"job {job.job_id}, {state.state}",
            remedy=f"`verl-slurm watch {paths.root}` follows it, `verl-slurm cancel {paths.root}` ends it",
        )


def _drift(paths: RunPaths, seen: prints.Fingerprint) -> prints.Drift | None:
    old = prints.read(paths)
    return (prints.drift(old, seen) or None) if old is not None else None


def _record_drift(paths: RunPaths, drift: prints.Drift) -> None:
    append_event(
        paths,
        "force_resume",
        added=list(drift.added),
        removed=list(drift.removed),
        changed=list(drift.changed),
    )


def _make_root(undo: ExitStack, root: Path) -> None:
    """Make the run directory. On failure what we made of it and its parents goes again, if empty."""
    missing = [root, *root.parents]
    missing = missing[: next(i for i, place in enumerate(missing) if place.exists())]
    for place in reversed(missing):
        undo.callback(_rmdir, place)
    private_dir(root)


def _rmdir(place: Path) -> None:
    with suppress(OSError):
        place.rmdir()


def _names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()


def _remove_new(directory: Path, before: set[str]) -> None:
    for name in _names(directory) - before:
        entry = directory / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _keep(undo: ExitStack, path: Path) -> None:
    """Put the present content of `path`, if any, back on failure."""
    if path.exists():
        undo.callback(write_file, path, path.read_bytes())


def _replace(undo: ExitStack, path: Path, data: bytes) -> None:
    _keep(undo, path)
    write_file(path, data)


@contextmanager
def _only_submitter(paths: RunPaths) -> Iterator[None]:
    """Two `submit`s of one run at once would queue two jobs."""
    fd = os.open(paths.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fenced(
                "another submit is at work on this run", where=paths.root, remedy="wait until it has ended"
            ) from None
        except OSError:
            pass  # a file system without locks: the lead's fencing still lets only one work
        yield
    finally:
        os.close(fd)
