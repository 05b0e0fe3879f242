"""A submission, in order: check everything, make, queue. A failure leaves nothing half-made."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from verl_slurm.base.errors import ConfigError, DatasetDrift, Fenced, NotFound, together
from verl_slurm.base.files import open_to_group, private_dir
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.checkpoint.store.lost import data_digest
from verl_slurm.checks import run_checks, told
from verl_slurm.config.changes import require_in_place
from verl_slurm.config.load import dump, given_in, left_of_run, load_resolved, read_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint import data_record as prints
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import append_event
from verl_slurm.runs.liveness import refuse_living
from verl_slurm.runs.run_record import has_begun, require_run
from verl_slurm.slurm.runner import tell_user
from verl_slurm.submit import undoing
from verl_slurm.submit.check_list import CHECKS, Draft, changed_keys, source_note, unexpanded
from verl_slurm.submit.checks.code_trees import CodeChoice, TreesRead, keep_code
from verl_slurm.submit.checks.model_and_reward import build_builtins
from verl_slurm.submit.checks.ranks_environment import why_not_run
from verl_slurm.submit.checks.run_directory import group_id
from verl_slurm.submit.checks.slurm_answers import choose_cluster
from verl_slurm.submit.checks.user_programs import python_not_run
from verl_slurm.submit.executor import MayBeQueued, submit_job
from verl_slurm.submit.relative_paths import Places, absolute, given_keys, with_values
from verl_slurm.submit.submission_plan import SubmissionPlan, trains_line
from verl_slurm.verl.verl_inputs import data_of

Confirm = Callable[[prints.Drift], bool]


class SubmissionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a submission."""

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
    verl: Sequence[str] = (),
    cluster: Literal["auto", "slurm", "local"] = "auto",
    ask_slurm: bool = True,
    base: Path | None = None,
    code: CodeChoice | None = None,
    trees: TreesRead | None = None,
    dry_run: bool = False,
    begin_again: Callable[[str], bool] | None = None,
) -> SubmissionPlan:
    """Checks everything that can be checked without making anything.

    Args:
        source: a YAML file, or a run directory (then its run.yaml: the same run again).
        overrides: `key=value` words.
        verl: words for verl itself.
        cluster: `auto` is Slurm if its commands are there.
        ask_slurm: False for a run that is only prepared.
        base: what the command line's paths are relative to (`relative_paths`); default: the working directory.
        code: for a run that has begun, and whose code has changed since: go on with the run's copy, or take the new.
        trees: of the user's code, as they were read for other runs of a sweep.
        dry_run: nothing that the configuration names is run (`ranks_environment.why_not_run`).
        begin_again: called if the run has lost all of its checkpoints, with what tells it; None: refuse.

    Raises:
        VerlSlurmError: what is wrong; where several looks refuse, the first one, with the others in its message.
        CheckpointsLost: the run has had a checkpoint and has none that can be used.
        Fenced: a job of this run is queued or running.
        NotFound: `source` is a directory, but not a run; or what to resume from is not there.
    """
    if source.is_dir():
        source = _run_yaml_of(source)
    written, wrong = read_config(source, overrides, verl)
    # Before paths become absolute: `$DATA/x` then looks like a directory below the working directory.
    wrong += unexpanded(written)
    places = Places(base or Path.cwd(), source, given_keys(overrides, verl))
    config, (chosen, chosen_note) = absolute(written, places), choose_cluster(cluster)
    doubt = source_note(source)
    draft = Draft(
        plan=SubmissionPlan(config=config, cluster=chosen, new_run=True),
        written=written,
        places=places,
        ask_slurm=ask_slurm and chosen == "slurm",
        not_run=why_not_run(config, dry_run=dry_run, stranger=bool(doubt)),
        directory=base or Path.cwd(),
        code=code,
        trees=trees,
        begin_again=begin_again,
    )
    refused = {section for key, _ in wrong for section in (key.partition(".")[0], "configuration")}
    with python_not_run(draft.not_run):
        results = run_checks(CHECKS, "submit", draft, refused=refused)
    if problems := [*(error for _, error in wrong), *results.refusals.values()]:
        raise together(problems, results.left_out)
    plan = draft.plan
    checked, notes = told(results.findings)
    plan.checked = ["configuration", *checked]
    plan.notes = [*places.notes, *filter(None, (doubt, chosen_note)), *notes]
    plan.trains = trains_line(plan.config, places.given | given_in(source), chosen, draft.trained)
    return plan


def carry_out(
    plan: SubmissionPlan, *, prepare_only: bool = False, confirm_drift: Confirm | None = None, after: str = ""
) -> SubmissionResult:
    """Makes the run directory and queues the job. A failure before that undoes all that was made.

    Args:
        prepare_only: make everything, queue nothing (for a script of `sbatch/`).
        confirm_drift: `--force-resume`: called if the data has changed; None: refuse.
        after: id of a Slurm job that must have ended for good before this one starts.

    Raises:
        DatasetDrift: the data has changed and the user did not confirm.
        SlurmRefused, SlurmMissing: sbatch.
        ConfigError: all steps are done.
        MayBeQueued: what sbatch did is not known. What was made stays.
    """
    plan.require_steps_to_do()
    config = build_builtins(plan.config)
    if plan.followed != "auto":
        # It stays in run.yaml, and with it in what the ranks are started with: the next submission knows it by that.
        config = with_values(config, {"checkpoint.resume_from": plan.followed})
    paths = RunPaths(plan.run_dir)
    changed = [] if plan.new_run else changed_keys(paths, config, begun=plan.begun)
    # Before anything is made or locked: the data may take long to read, and the user may be asked.
    survey, drift = _confirmed_drift(plan, data_of(config), confirm_drift)
    notices = list(survey.notices) if survey is not None else []
    job_id: str | None = None
    with ExitStack() as held:
        # Callbacks run in reverse order: directories are removed last, when what was made in them is gone.
        with ExitStack() as undo:
            undoing.make_root(undo, paths.root)
            held.enter_context(undoing.only_submitter(paths))
            _require_as_planned(plan, paths, ask_for_unknown=plan.cluster == "slurm" and not prepare_only)
            _write_run(undo, plan, config)
            run_id(paths)  # before the first event, which bears it
            notices += _write_fingerprint(undo, plan, survey, drift)
            copied = keep_code(undo, paths, plan.code)
            # sbatch comes last, since all before it can be undone and a queued job cannot.
            if not prepare_only:
                try:
                    job_id, words = submit_job(msgspec.structs.replace(plan, config=config), after)
                except (MayBeQueued, KeyboardInterrupt) as error:
                    undo.pop_all()  # a job may exist, and needs what was made
                    if isinstance(error, KeyboardInterrupt):
                        tell_user(_interrupted(paths.root))
                    raise
                notices += [note for note in words if note not in plan.notes]
            undo.pop_all()  # a job exists: from here on nothing is undone
        # After the job: a confirmed change whose submission failed has changed nothing.
        events: list[ev.Event] = [] if drift is None else [_accepted(drift)]
        events += [*([ev.ForceResume(lost=plan.begins_again)] if plan.begins_again else []), *copied]
        if job_id is not None:
            # Still under the lock: the next submit learns of this job from the journal.
            events.append(ev.Submitted(plan.cluster, socket.gethostname(), plan.slurm, job_id=job_id))
            if plan.avoids:
                # Names no node: the user's record says how long. A requeue looks there again, and takes it back.
                detail = f"the job avoids {', '.join(plan.avoids)}"
                events.append(ev.Avoid([], detail, told=list(plan.avoids), job_id=job_id))
        _write_down(paths, events, job_id)
    return SubmissionResult(
        run_dir=str(paths.root),
        cluster=plan.cluster,
        job_id=job_id,
        new_run=plan.new_run,
        changed=tuple(changed),
        notes=(*plan.notes, *notices),
    )


def _interrupted(run: Path) -> str:
    return f"interrupted while the job was submitted: it may be queued; {_ways(run)}"


def _ways(run: Path) -> str:
    return f"`verl-slurm status {shell_word(run)}` tells, `verl-slurm cancel {shell_word(run)}` ends it"


def _write_down(paths: RunPaths, events: Sequence[ev.Event], job_id: str | None) -> None:
    try:
        for event in events:
            append_event(paths, event)
    except OSError:
        if job_id is not None:
            tell_user(f"job {job_id} is queued, and the journal does not name it: {_ways(paths.root)}")
        raise


def _require_as_planned(plan: SubmissionPlan, paths: RunPaths, *, ask_for_unknown: bool) -> None:
    """Raises Fenced if the run is not as the plan found it any more, or has begun."""
    # The plan was made without the lock.
    if paths.run_yaml.exists() is plan.new_run:
        raise Fenced("another submit was faster", where=paths.root, remedy="submit again to see its run")
    refuse_living(paths, ask_for_unknown=ask_for_unknown)
    # A run that has not begun may change any key. What was saved since then would not fit the new ones.
    if not plan.begun and has_begun(paths):
        raise Fenced("the run has begun meanwhile", where=paths.root, remedy="submit again")


def _write_run(undo: ExitStack, plan: SubmissionPlan, config: RunConfig) -> None:
    paths = RunPaths(plan.run_dir)
    # By the names that are there now: files of an existing run, or of its earlier jobs, survive a refusal.
    undo.callback(undoing.remove_new, paths.logs, undoing.names_in(paths.logs))
    undo.callback(undoing.remove_new, paths.root, undoing.names_in(paths.root))
    private_dir(paths.logs)
    private_dir(paths.control)
    for shown in (paths.root, paths.logs):
        open_to_group(shown, group_id(config))
    # Before sbatch: the child that submits reads run.yaml, and the job may start at once.
    undoing.replace_content(undo, paths.run_yaml, dump(config))
    # A named checkpoint counts for one start, which removes the mark; a requeued job takes the newest.
    if plan.config.checkpoint.resume_from != "auto":
        undoing.make_mark(undo, paths.resume_once)
    else:
        # Of a submission that never started: its checkpoint is not in run.yaml any more.
        undoing.keep_content(undo, paths.resume_once)
        paths.resume_once.unlink(missing_ok=True)
    if plan.begins_again:
        undoing.make_mark(undo, paths.from_nothing)
    if not plan.begun and paths.orchestration.exists():
        # A start that came to nothing may have written the layout of the former configuration.
        undoing.keep_content(undo, paths.orchestration)
        paths.orchestration.unlink()


def _write_fingerprint(
    undo: ExitStack, plan: SubmissionPlan, survey: prints.Survey | None, drift: prints.Drift | None
) -> list[str]:
    paths = RunPaths(plan.run_dir)
    if survey is None:
        return []
    # Otherwise the record stays: it was read in full, and what is compared with it trusts sizes and dates.
    if drift is not None or not plan.begun or not paths.fingerprint.exists():
        undoing.keep_content(undo, paths.fingerprint)
        prints.write(paths, survey.found)
    # The cache shortens later looks alone: where it cannot be written, that is said, and the run starts.
    forgotten = prints.remember(paths.hash_cache, survey)
    return [forgotten] if forgotten else []


def check_drift(plan: SubmissionPlan, confirm_drift: Confirm | None = None) -> None:
    """Raises DatasetDrift if the data is not that of the run's first start, as `carry_out` does. Makes nothing."""
    if plan.begun:
        _confirmed_drift(plan, data_of(plan.config), confirm_drift)


def _confirmed_drift(
    plan: SubmissionPlan, place: prints.DataPlace | None, confirm_drift: Confirm | None
) -> tuple[prints.Survey | None, prints.Drift | None]:
    """Returns what the data is now, and its changes in a run that has begun."""
    if place is None:
        return None, None
    paths = RunPaths(plan.run_dir)
    # A run that has not begun may start on other data: nothing in it depends on them yet.
    old = prints.read(paths) if plan.begun else None
    # A change that may be accepted is read in full, since the record is what later looks are compared with.
    seen = prints.look(paths, place, old, may_record=confirm_drift is not None)
    drift = (seen.drift_from(old) or None) if old is not None else None
    # Without its record a run still knows what its newest checkpoint was trained on, if not which files these were.
    if old is None and plan.begun and (trained := data_digest(paths)) and trained != seen.found.digest:
        if confirm_drift is None:
            prints.require_trained_on(seen.found, trained, place)
        digests = f"digest {seen.found.digest[:16]} now, {trained[:16]} in the newest checkpoint"
        drift = prints.Drift(
            changed=(f"{digests}; which files differ is not known: {paths.fingerprint} is lost",)
        )
    if drift is not None and (confirm_drift is None or not confirm_drift(drift)):
        raise DatasetDrift(
            "the data has changed since the run started",
            where=prints.place_of(place),
            found=drift.one_line(),
            expected="the files of the first start",
            remedy="restore them, start a new run, or accept the change with --force-resume",
        )
    return seen, drift


def _run_yaml_of(directory: Path) -> Path:
    """Returns the run.yaml of a run that lies where it was made. NotFound: no run. ConfigError: a copy."""
    source = directory / "run.yaml"
    if not source.is_file() and not left_of_run(directory):
        raise NotFound(
            "a directory, but not a run",
            where=directory,
            expected="a YAML file, or a run directory with its run.yaml",
            remedy="see the runs with `verl-slurm list DIR`",
        )
    # A copy has the original's run id, and its run.yaml names the original's directory.
    require_in_place(directory, load_resolved(source), "submit")
    return source


def _accepted(drift: prints.Drift) -> ev.ForceResume:
    return ev.ForceResume(list(drift.added), list(drift.removed), list(drift.changed))


def plan_verl_run(target: Path, overrides: Sequence[str] = (), *, dry_run: bool = False) -> SubmissionPlan:
    """Plans the run of verl that `target`, a run or a YAML file, is, to take over checkpoints; makes nothing.

    `overrides` are for a run that does not exist yet.

    Raises:
        ConfigError: its loop is not verl's; or overrides for an existing run.
        NotFound, DataError, PermissionRefused, NoRoom, Fenced: `plan_submission`.
    """
    # As for a run that is only prepared: Slurm's verdict is asked for at submission.
    # A run that has lost its checkpoints may take over others.
    plan = plan_submission(
        target, list(overrides), cluster="slurm", ask_slurm=False, dry_run=dry_run, begin_again=lambda _: True
    )
    if plan.config.trainer.backend != "verl":
        raise ConfigError(
            "only a run of verl can take over checkpoints of verl",
            where=target,
            found=f"trainer.backend: {plan.config.trainer.backend}",
            expected="trainer.backend: verl",
            remedy="set it (and trainer.entry: ppo or sft), or leave the run out: then only the tracker is repaired",
        )
    return plan


@contextmanager
def hold_run(plan: SubmissionPlan) -> Iterator[tuple[RunPaths, RunConfig]]:
    """Yields the run, made if it does not exist. While this holds, no job of it is alive and no other submit is at
    work. Fenced: it has a job, or another process holds it.
    """
    paths = RunPaths(plan.run_dir)
    if plan.new_run:
        # Outside the lock below, which it takes for itself: by another descriptor flock refuses its own process, too.
        # It stays if the work with it fails: it is then a prepared run.
        carry_out(plan, prepare_only=True)
    require_run(paths)
    with undoing.only_submitter(paths):
        # Asked under the lock, so that no submit queues a job between the answer and the work.
        refuse_living(paths)
        yield paths, load_resolved(paths.run_yaml)
