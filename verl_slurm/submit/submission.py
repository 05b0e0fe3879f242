"""A submission, in order: check everything, make, queue. A failure leaves nothing half-made.

* `plan_submission` checks, in this order: config, paths, run directory, model and data, Slurm, an existing run. It
  makes nothing.
* `carry_out` makes built-ins, the fingerprint, RUN/ and run.yaml, and queues the job by sbatch. On a failure all of it
  is undone.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from verl_slurm.base.errors import ConfigError, DatasetDrift, Fenced, NotFound
from verl_slurm.base.files import open_to_group, private_dir
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.packages import require_packages
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.lost import data_digest, former_checkpoint, require_run_id
from verl_slurm.checkpoint.store.run_config import trained_with
from verl_slurm.config.changes import refuse_changes, require_in_place
from verl_slurm.config.elastic import keep_step
from verl_slurm.config.load import dump, given_in, load, load_resolved
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint import record as prints
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import append_event
from verl_slurm.program.programs import Moves
from verl_slurm.runs.liveness import refuse_living
from verl_slurm.runs.record import ended_well, has_begun, require_run, steps_done
from verl_slurm.submit.checks.bad_nodes import nodes_to_avoid
from verl_slurm.submit.checks.code import CodeChoice, TreesRead, keep_code, plan_code
from verl_slurm.submit.checks.containers import check_container
from verl_slurm.submit.checks.deadlines import check_deadlines
from verl_slurm.submit.checks.group import check_group, group_id
from verl_slurm.submit.checks.inputs import absolute, build_builtins, built_before, check_guest
from verl_slurm.submit.checks.model_families import check_family
from verl_slurm.submit.checks.preflight import (
    check_hooks,
    check_inputs,
    check_keys,
    check_metrics_port,
    check_resume_from,
    check_run_dir,
    check_slurm,
    check_surroundings,
    check_written,
    choose_cluster,
    gpu_note,
    source_note,
)
from verl_slurm.submit.checks.programs import python_not_run
from verl_slurm.submit.checks.rank_environment import check_rank_environment, why_not_run
from verl_slurm.submit.checks.resume_point import ResumeFound, check_frozen_inputs, check_records, find_resume
from verl_slurm.submit.checks.room import check_room, frozen_to_come
from verl_slurm.submit.checks.services import check_services
from verl_slurm.submit.checks.slurm_verdict import judge_script
from verl_slurm.submit.checks.submitting_machine import machine_notes
from verl_slurm.submit.checks.verl import check_verl
from verl_slurm.submit.executor import MayBeQueued, render_script, submit_job
from verl_slurm.submit.plan import SubmissionPlan, reshaped, trains_line, why_done
from verl_slurm.submit.relative_paths import Places, given_keys
from verl_slurm.submit.undoing import (
    keep_content,
    make_mark,
    make_root,
    names_in,
    only_submitter,
    remove_new,
    replace_content,
)
from verl_slurm.tiers.opening import namesakes
from verl_slurm.verl.inputs import data_of

Confirm = Callable[[prints.Drift], bool]

_BY_LENGTH = ("linear", "cosine", "wsd")
"""Schedules that end with the run (trainer/objective/optimizers.py)."""


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
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
        dry_run: nothing that the configuration names is run (`rank_environment.why_not_run`).
        begin_again: called if the run has lost all of its checkpoints, with what tells it; None: refuse.

    Raises:
        CheckpointsLost: the run has had a checkpoint and has none that can be used.
        ConfigError, DataError, PermissionRefused, SlurmMissing, SlurmRefused, NoRoom: what is wrong.
        Fenced: a job of this run is queued or running.
        NotFound: `source` is a directory, but not a run; or what to resume from is not there.
    """
    if source.is_dir():
        source = _run_yaml_of(source)
    written = load(source, overrides, verl, complete=True)
    # Before paths become absolute: `$DATA/x` then looks like a directory below the working directory.
    check_written(written)
    places = Places(base or Path.cwd(), source, given_keys(overrides, verl))
    config = absolute(written, places)
    paths = RunPaths(config.run_dir)
    check_run_dir(paths.root)
    checked = ["configuration", "run directory"]
    packages = ("torch",) if config.trainer.is_guest else ("torch", "transformers", "numpy")
    if config.slurm.container is None and config.slurm.python is None:
        # Ranks run in the environment that submits. If they have a container of their own, the job finds out.
        # A guest brings packages of its own; torch is what saving its state needs.
        require_packages(*packages, wanted_by=f"a run with trainer.backend: {config.trainer.backend}")
    doubt = source_note(source)
    not_run = why_not_run(config, dry_run=dry_run, stranger=bool(doubt))
    good, unseen = check_rank_environment(config, packages, not_run)
    checked += good
    inputs: list[tuple[str, str]] = []
    with python_not_run(not_run):
        hooks, services = check_hooks(config), check_services(config)
    checked += [*hooks.good, *services.good]
    notes: list[str] = []
    good, unreachable = check_group(config)
    checked += good
    # With `--code run` the programs that count are the run's copies: those outside may be gone.
    runs = Moves.of(paths).config(config) if code == "run" else config
    # Local questions come before Slurm's: without slurmctld a command of Slurm takes 9 s to say so.
    if config.trainer.is_guest:
        with python_not_run(not_run):
            good, notes = check_guest(runs)
        checked += good
        if data_of(config) is None:
            notes.append(
                "not looked at: whether the data stays the same between attempts; data.root names it"
            )
    else:
        with python_not_run(not_run):
            inputs, notes = check_inputs(runs, written.model.path, begun=has_begun(paths))
        notes += check_family(config)
        checked += [f"{name} {taken}" for name, taken in inputs]
    check_resume_from(config)
    if config.checkpoint.resume_from not in (None, "auto"):
        checked.append("the checkpoint to resume from")
    chosen, note = choose_cluster(cluster)
    config, good = check_container(config, chosen)
    checked += good
    slurm, told = None, tuple[str, ...]()
    if chosen == "slurm" and ask_slurm:
        slurm = check_slurm(config)
        told = slurm.notes
        checked.append(f"Slurm partition {config.slurm.partition}" if config.slurm.partition else "Slurm")
    asked = (
        check_surroundings(config),
        check_keys(config, chosen),
        gpu_note(config, chosen),
        check_metrics_port(config),
        unreachable,
    )
    unseen = [*unseen, *hooks.notes, *services.notes]
    notes = [*places.notes, *(text for text in (doubt, *unseen, note, *told, *asked, *notes) if text)]
    if slurm is not None:
        notes += machine_notes(config, slurm.conf)
    if config.checkpoint.encryption is not None:
        checked.append("key")
    # An existing run: what it has trained with decides what may change, and no job of it may live.
    new_run, begun, done = not paths.run_yaml.exists(), False, ""
    committed: list[CheckpointInfo] = []
    found = ResumeFound()
    if new_run and (other := places.run_beside(written.run_dir.replace("{name}", config.name))):
        word = shell_word(f"run_dir={other}")
        notes.append(
            f"a new run, since run_dir goes by where you are: {other} exists beside the YAML; {word} means it"
        )
    if new_run and config.checkpoint.resume_from == "auto":
        notes += [
            f"a new run, which begins at step 0: tier {tier} has checkpoints of an earlier one of this name, and "
            f"{shell_word(f'checkpoint.resume_from={step}')} goes on from the newest"
            for tier, step in namesakes(config).items()
        ]
    if not new_run:
        # Here as well as in the lead: the job would end before its journal could say so.
        require_run_id(paths)
        committed = [info for info in list_checkpoints(paths) if info.kind == "committed"]
        check_records(paths, committed)
        begun = has_begun(paths) or bool(former_checkpoint(paths, config))
        former = _former(paths, config, begun=begun)
        # Before the comparison: the path of a built-in holds a hash of its builder, which differs after an upgrade.
        config = built_before(config, former)
        resharded = former.distributed.axes != config.distributed.axes
        # A step has the same number of responses on any number of ranks, so sizes per device follow the devices.
        if begun and resharded and not config.trainer.is_guest:
            config = keep_step(former, config)
            notes.append(reshaped(former, config))
        changed = _changes(paths, config, begun=begun)
        # Allowed, and said: in a longer run the rate of each step to come is another one.
        if begun and "train.steps" in changed and config.train.lr_schedule in _BY_LENGTH:
            schedule = config.train.lr_schedule
            notes.append(f"train.steps changes the {schedule} schedule: learning rates differ from here on")
        refuse_living(paths, ask_for_unknown=chosen == "slurm" and ask_slurm)
        well = ended_well(paths)
        done = why_done(config, committed) if well else ""
        if config.trainer.is_guest and well:
            notes.append(
                "the run has ended as done: it ends again at once, unless its program has more to do"
            )
        checked.append("the run's former configuration and job")
        found = find_resume(config, paths, committed, begin_again)
        checked += [f"checkpoint {found.name}: every byte"] if found.read else []
        notes += [found.note] if found.note else []
    caller = base or Path.cwd()
    taken = plan_code(config, caller, paths, begun=begun, choice=code, known=trees, ask_python=not not_run)
    notes += taken.notes
    if taken.record.trees:
        checked.append(f"code {'; '.join(taken.lines())}")
    wanted = config.checkpoint.resume_from
    if (source_name := found.name if wanted == "auto" else wanted) and not config.trainer.is_guest:
        # With `--code new` a changed reward is a new copy, which the ranks refuse.
        moved = Moves.of(paths).config(config) if code == "run" else config
        notes += check_frozen_inputs(moved, paths, source_name)
    trained = ""
    if config.trainer.backend == "verl":
        with python_not_run(not_run):
            good, doubtful, trained = check_verl(config, paths, committed)
        checked, notes = [*checked, *good], [*notes, *doubtful]
    # The newest committed checkpoint tells what one takes, so room and deadlines are asked after the run was looked at.
    if note := check_room(config, paths.checkpoints, committed, frozen=frozen_to_come(config, paths)):
        notes.append(note)
    if slurm is not None:
        good, doubtful = check_deadlines(config, paths, committed, slurm)
        checked, notes = [*checked, *good], [*notes, *doubtful]
    avoids: tuple[str, ...] = ()
    if slurm is not None:
        avoids, doubtful = nodes_to_avoid(config, slurm)
        notes = [*notes, *doubtful]
    plan = SubmissionPlan(
        config=config,
        run_dir=paths.root,
        cluster=chosen,
        new_run=new_run,
        begun=begun,
        resumes_from=found.name,
        resume_read=found.read,
        begins_again=found.lost,
        inputs=tuple(inputs),
        code=taken,
        checked=tuple(checked),
        slurm="" if slurm is None else slurm.conf.get("ClusterName", ""),
        avoids=avoids,
        notes=tuple(notes),
        trains=trains_line(config, places.given | given_in(source), chosen, trained),
        done=done,
    )
    if slurm is None:
        return plan
    # The last question, since sbatch judges the very script that would be queued.
    said, words = judge_script(config, render_script(plan))
    checked.append(f"sbatch --test-only: {said}")
    return msgspec.structs.replace(plan, checked=tuple(checked), notes=(*plan.notes, *words))


def carry_out(
    plan: SubmissionPlan,
    *,
    prepare_only: bool = False,
    confirm_drift: Confirm | None = None,
    after: str = "",
) -> Submitted:
    """Makes the run directory and queues the job.

    Args:
        plan: from `plan_submission`.
        prepare_only: make everything, queue nothing (for a script of `sbatch/`).
        confirm_drift: `--force-resume`: called if the data has changed; None: refuse.
        after: id of a Slurm job that must have ended for good before this one starts.

    Raises:
        DatasetDrift: the data has changed and the user did not confirm.
        SlurmRefused, SlurmMissing: sbatch. Everything made so far is removed again.
        ConfigError: all steps are done.
        MayBeQueued: what sbatch did is not known. What was made stays.
    """
    plan.require_steps_to_do()
    config = build_builtins(plan.config)
    paths = RunPaths(plan.run_dir)
    changed = [] if plan.new_run else _changes(paths, config, begun=plan.begun)
    # Before anything is made or locked: the data may take long to read, and the user may be asked.
    seen, drift = _confirmed_drift(plan, data_of(config), confirm_drift)
    notices = list(seen.notices) if seen is not None else []
    job_id: str | None = None
    with ExitStack() as held:
        # Callbacks run in reverse order: directories are removed last, when what was made in them is gone.
        with ExitStack() as undo:
            make_root(undo, paths.root)
            held.enter_context(only_submitter(paths))
            # The plan was made without the lock. Another submit may have made the run since, or taken it back.
            if paths.run_yaml.exists() is plan.new_run:
                raise Fenced(
                    "another submit was faster", where=paths.root, remedy="submit again to see its run"
                )
            # As well: between the plan and the lock it may have queued a job.
            refuse_living(paths, ask_for_unknown=plan.cluster == "slurm" and not prepare_only)
            # By the names that are there now: files of an existing run, or of its earlier jobs, survive a refusal.
            undo.callback(remove_new, paths.logs, names_in(paths.logs))
            undo.callback(remove_new, paths.root, names_in(paths.root))
            private_dir(paths.logs)
            private_dir(paths.control)
            for shown in (paths.root, paths.logs):
                open_to_group(shown, group_id(config))
            # Before sbatch: the child that submits reads run.yaml, and the job may start at once.
            replace_content(undo, paths.run_yaml, dump(config))
            # A named checkpoint counts for one start, which removes the mark; a requeued job takes the newest.
            if config.checkpoint.resume_from != "auto":
                make_mark(undo, paths.resume_once)
            if plan.begins_again:
                make_mark(undo, paths.from_nothing)
            # A run that has not begun may change any key. What was saved since the plan was made would not fit the new
            # ones.
            if not plan.begun and has_begun(paths):
                raise Fenced("the run has begun meanwhile", where=paths.root, remedy="submit again")
            if not plan.begun and paths.orchestration.exists():
                # A start that came to nothing may have written the layout of the former configuration.
                keep_content(undo, paths.orchestration)
                paths.orchestration.unlink()
            if seen is not None:
                # Otherwise the record stays: it was read in full, and what is compared with it trusts sizes and dates.
                if drift is not None or not plan.begun or not paths.fingerprint.exists():
                    keep_content(undo, paths.fingerprint)
                    prints.write(paths, seen.found)
                # The cache shortens later looks alone: where it cannot be written, that is said, and the run starts.
                if forgotten := prints.remember(paths.hash_cache, seen):
                    notices.append(forgotten)
            copied = keep_code(undo, paths, plan.code)
            # sbatch comes last, since all before it can be undone and a queued job cannot.
            if not prepare_only:
                try:
                    job_id, words = submit_job(msgspec.structs.replace(plan, config=config), after)
                except (MayBeQueued, KeyboardInterrupt):
                    undo.pop_all()  # a job may exist, and needs what was made
                    raise
                notices += [note for note in words if note not in plan.notes]
            undo.pop_all()  # a job exists: from here on nothing is undone
        if drift is not None:
            # After the job: a confirmed change whose submission failed has changed nothing.
            _record_drift(paths, drift)
        if plan.begins_again:
            append_event(paths, ev.ForceResume(lost=plan.begins_again))
        for told in copied:
            append_event(paths, told)
        if job_id is not None:
            # Still under the lock: the next submit learns of this job from the journal.
            host = socket.gethostname()
            append_event(paths, ev.Submitted(plan.cluster, host, plan.slurm, job_id=job_id))
            if plan.avoids:
                # Names no node: the user's record says how long. A requeue looks there again, and takes it back.
                detail = f"the job avoids {', '.join(plan.avoids)}"
                append_event(paths, ev.Avoid([], detail, told=list(plan.avoids), job_id=job_id))
    return Submitted(
        run_dir=str(paths.root),
        cluster=plan.cluster,
        job_id=job_id,
        new_run=plan.new_run,
        changed=tuple(changed),
        notes=(*plan.notes, *notices),
    )


def check_drift(plan: SubmissionPlan, confirm_drift: Confirm | None = None) -> None:
    """Checks that the data is that of the run's first start, as `carry_out` does. Makes nothing.

    Raises:
        DatasetDrift: the data has changed and the user did not confirm.
    """
    if plan.begun:
        _confirmed_drift(plan, data_of(plan.config), confirm_drift)


def _confirmed_drift(
    plan: SubmissionPlan, place: prints.DataPlace | None, confirm_drift: Confirm | None
) -> tuple[prints.Survey | None, prints.Drift | None]:
    """Returns the changes in the data of a run that has begun; a run that has not may start on other data."""
    if place is None:
        return None, None
    paths = RunPaths(plan.run_dir)
    # A run that has not begun may start on other data: nothing in it depends on them yet.
    old = prints.read(paths) if plan.begun else None
    # A change that may be accepted is read in full, since the record is what later looks are compared with.
    seen = prints.look(paths, place, old, may_record=confirm_drift is not None)
    drift = (prints.drift(old, seen.found) or None) if old is not None else None
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


def _changes(paths: RunPaths, config: RunConfig, *, begun: bool) -> list[str]:
    old = _former(paths, config, begun=begun)
    return refuse_changes(old, config, paths.root, begun=begun, steps_done=steps_done(paths))


def _former(paths: RunPaths, config: RunConfig, *, begun: bool) -> RunConfig:
    """Returns the configuration that the run has trained with; before it has begun, that of its run.yaml."""
    written = load_resolved(paths.run_yaml)
    if not begun:
        return written
    # Of the newest checkpoint, where the record of the newest ranks is missing or of another version.
    newest = next((info.path for info in list_checkpoints(paths) if info.kind == "committed"), None)
    # run.yaml may have been edited while the job waited; compared with itself, no change would be found.
    return trained_with(paths, config, newest) or written


def _run_yaml_of(directory: Path) -> Path:
    """Returns the run.yaml of a run that lies where it was made.

    Raises:
        NotFound: no run.
        ConfigError: a copy: if submitted, it would continue the original.
    """
    source = directory / "run.yaml"
    if not source.is_file():
        raise NotFound(
            "a directory, but not a run",
            where=directory,
            expected="a YAML file, or a run directory with its run.yaml",
            remedy="see the runs with `verl-slurm list DIR`",
        )
    # A copy has the original's run id, and its run.yaml names the original's directory.
    require_in_place(directory, load_resolved(source), "submit")
    return source


def _record_drift(paths: RunPaths, drift: prints.Drift) -> None:
    append_event(paths, ev.ForceResume(list(drift.added), list(drift.removed), list(drift.changed)))


def plan_verl_run(target: Path, overrides: Sequence[str] = (), *, dry_run: bool = False) -> SubmissionPlan:
    """Plans the run of verl that `target` is or describes, to take over checkpoints; makes nothing.

    Args:
        target: a run's directory, or a YAML file.
        overrides: `key=value` words, for a run that does not exist yet.
        dry_run: as of `plan_submission`.

    Raises:
        ConfigError: its loop is not verl's; or overrides for an existing run, which `submit` is for.
        NotFound, DataError, PermissionRefused, NoRoom, Fenced: `plan_submission`.
    """
    # As for a run that is only prepared: Slurm's verdict is asked for at submission.
    # A run that has lost its checkpoints may take over others.
    plan = plan_submission(
        target,
        list(overrides),
        cluster="slurm",
        ask_slurm=False,
        dry_run=dry_run,
        begin_again=lambda _: True,
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
    work.

    A run that was made stays if the work with it fails: it is then a prepared run.

    Raises:
        Fenced: it has a job, or another process holds it.
    """
    paths = RunPaths(plan.run_dir)
    if plan.new_run:
        # Outside the lock below, which it takes for itself: by another descriptor flock refuses its own process, too.
        carry_out(plan, prepare_only=True)
    require_run(paths)
    with only_submitter(paths):
        # Asked under the lock, so that no submit queues a job between the answer and the work.
        refuse_living(paths)
        yield paths, load_resolved(paths.run_yaml)
