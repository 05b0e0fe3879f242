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

from verl_slurm.base.errors import ConfigError, DatasetDrift, Fenced, NotFound, VerlSlurmError, together
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
from verl_slurm.config.load import dump, given_in, load_resolved, read_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint import data_record as prints
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import append_event
from verl_slurm.program.programs import Moves
from verl_slurm.runs.liveness import refuse_living
from verl_slurm.runs.run_record import ended_well, has_begun, require_run, steps_done
from verl_slurm.submit.checks.avoided_nodes import nodes_to_avoid
from verl_slurm.submit.checks.code_trees import CodeChoice, TreesRead, keep_code, plan_code
from verl_slurm.submit.checks.deadlines import check_deadlines
from verl_slurm.submit.checks.group import check_group, group_id
from verl_slurm.submit.checks.model_and_reward import absolute, build_builtins, built_before, check_guest
from verl_slurm.submit.checks.model_families import check_family
from verl_slurm.submit.checks.pinned_image import check_container
from verl_slurm.submit.checks.preflight import (
    SlurmSays,
    check_hooks,
    check_inputs,
    check_keys,
    check_metrics_port,
    check_resume_from,
    check_run_dir,
    check_slurm,
    check_surroundings,
    choose_cluster,
    gpu_note,
    source_note,
    unexpanded,
)
from verl_slurm.submit.checks.ranks_environment import check_rank_environment, why_not_run
from verl_slurm.submit.checks.resume_point import check_frozen_inputs, check_records, find_resume
from verl_slurm.submit.checks.room import check_room, frozen_to_come
from verl_slurm.submit.checks.service_programs import check_services
from verl_slurm.submit.checks.slurm_verdict import judge_script
from verl_slurm.submit.checks.submitting_machine import machine_notes
from verl_slurm.submit.checks.user_programs import python_not_run
from verl_slurm.submit.checks.verl import check_verl
from verl_slurm.submit.executor import MayBeQueued, render_script, submit_job
from verl_slurm.submit.relative_paths import Places, given_keys
from verl_slurm.submit.submission_plan import SubmissionPlan, reshaped, trains_line, why_done
from verl_slurm.submit.undoing import (
    keep_content,
    make_mark,
    make_root,
    names_in,
    only_submitter,
    remove_new,
    replace_content,
)
from verl_slurm.tiers.survey import namesakes
from verl_slurm.verl.verl_inputs import data_of

Confirm = Callable[[prints.Drift], bool]

_BY_LENGTH = ("linear", "cosine", "wsd")
"""Schedules that end with the run (trainer/objective/optimizers.py)."""


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


class _Draft(msgspec.Struct, kw_only=True):
    """A plan in the making: each look adds what is good, what the user should know, and what is wrong.

    Attributes:
        written: the configuration as the user wrote it.
        doubt: why the configuration may be a stranger's; empty: it is the user's.
        not_run: why nothing that the configuration names is run (`why_not_run`); empty: it is.
        code, trees, begin_again: as of `plan_submission`; `directory` is its `base`.
        refused: sections with a wrong key, and looks that have refused; what goes by them is not looked at.
        problems: all that was refused, to be said in one answer.
        committed: checkpoints of the run, newest first.
        trained: what verl will train.
    """

    plan: SubmissionPlan
    written: RunConfig
    places: Places
    ask_slurm: bool
    not_run: str
    directory: Path
    code: CodeChoice | None
    trees: TreesRead | None
    begin_again: Callable[[str], bool] | None
    refused: set[str] = set()
    problems: list[VerlSlurmError] = []
    slurm: SlurmSays | None = None
    committed: list[CheckpointInfo] = []
    trained: str = ""

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.plan.run_dir)

    def add(self, good: Sequence[str], notes: Sequence[str | None] = ()) -> None:
        self.plan.checked += good
        self.plan.notes += [note for note in notes if note]

    def note(self, *notes: str | None) -> None:
        self.add([], notes)


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
        VerlSlurmError: what is wrong; where several looks refuse, the first one, with the others in its message.
        CheckpointsLost: the run has had a checkpoint and has none that can be used.
        ConfigError, DataError, PermissionRefused, SlurmMissing, SlurmRefused, NoRoom: a look refuses.
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
    draft = _Draft(
        plan=SubmissionPlan(config=config, cluster=chosen, new_run=True),
        written=written,
        places=places,
        ask_slurm=ask_slurm and chosen == "slurm",
        not_run=why_not_run(config, dry_run=dry_run, stranger=bool(doubt)),
        directory=base or Path.cwd(),
        code=code,
        trees=trees,
        begin_again=begin_again,
        refused={section for key, _ in wrong for section in (key.partition(".")[0], "configuration")},
        problems=[error for _, error in wrong],
    )
    draft.add(["configuration"], [*places.notes, doubt, chosen_note])
    with python_not_run(draft.not_run):
        for look, goes_by in _LOOKS.items():
            if draft.refused.isdisjoint(goes_by):
                try:
                    look(draft)
                except VerlSlurmError as error:
                    draft.problems.append(error)
                    draft.refused.add(look.__name__)
    if draft.problems:
        raise together(draft.problems)
    plan = draft.plan
    plan.trains = trains_line(plan.config, places.given | given_in(source), chosen, draft.trained)
    if draft.slurm is not None:
        # The last question, since sbatch judges the very script that would be queued.
        said, words = judge_script(plan.config, render_script(plan))
        draft.add([f"sbatch --test-only: {said}"], words)
    return plan


def _directory(draft: _Draft) -> None:
    check_run_dir(draft.paths.root)
    draft.plan.new_run = not draft.paths.run_yaml.exists()  # asked of a directory that is ours alone
    draft.add(["run directory"])


def _imported(config: RunConfig) -> tuple[str, ...]:
    # A guest brings packages of its own; torch is what saving its state needs.
    return ("torch",) if config.trainer.is_guest else ("torch", "transformers", "numpy")


def _packages(draft: _Draft) -> None:
    # Ranks run in the environment that submits. If they have a container of their own, the job finds out.
    config = draft.plan.config
    if config.slurm.container is None and config.slurm.python is None:
        wanted_by = f"a run with trainer.backend: {config.trainer.backend}"
        require_packages(*_imported(config), wanted_by=wanted_by)


def _rank_environment(draft: _Draft) -> None:
    config = draft.plan.config
    draft.add(*check_rank_environment(config, _imported(config), draft.not_run))


def _hooks(draft: _Draft) -> None:
    draft.add(*check_hooks(draft.plan.config))


def _services(draft: _Draft) -> None:
    draft.add(*check_services(draft.plan.config))


def _group(draft: _Draft) -> None:
    good, unreachable = check_group(draft.plan.config)
    draft.add(good, [unreachable])


def _inputs(draft: _Draft) -> None:
    plan, config = draft.plan, draft.plan.config
    # With `--code run` the programs that count are the run's copies: those outside may be gone.
    runs = Moves.of(draft.paths).config(config) if draft.code == "run" else config
    if config.trainer.is_guest:
        draft.add(*check_guest(runs))
        if data_of(config) is None:
            draft.note("not looked at: whether the data stays the same between attempts; data.root names it")
        return
    plan.inputs, notes = check_inputs(runs, draft.written.model.path, begun=has_begun(draft.paths))
    notes += check_family(config)
    draft.add([f"{name} {taken}" for name, taken in plan.inputs], notes)


def _resume_from(draft: _Draft) -> None:
    check_resume_from(draft.plan.config)
    if draft.plan.config.checkpoint.resume_from not in (None, "auto"):
        draft.add(["the checkpoint to resume from"])


def _container(draft: _Draft) -> None:
    draft.plan.config, good = check_container(draft.plan.config, draft.plan.cluster)
    draft.add(good)


def _keys(draft: _Draft) -> None:
    config = draft.plan.config
    note = check_keys(config, draft.plan.cluster)
    draft.add([] if config.checkpoint.encryption is None else ["key"], [note])


def _slurm(draft: _Draft) -> None:
    config = draft.plan.config
    if draft.ask_slurm:
        draft.slurm = check_slurm(config)
        name = f"Slurm partition {config.slurm.partition}" if config.slurm.partition else "Slurm"
        draft.add([name], [*draft.slurm.notes, *machine_notes(config, draft.slurm.conf)])


def _beside(draft: _Draft) -> None:
    """Looks for earlier runs that a new one may have been meant to go on with."""
    config = draft.plan.config
    if other := draft.places.run_beside(draft.written.run_dir.replace("{name}", config.name)):
        meant = f"{other} exists beside the YAML; {shell_word(f'run_dir={other}')} means it"
        draft.note(f"a new run, since run_dir goes by where you are: {meant}")
    if config.checkpoint.resume_from == "auto":
        for tier, step in namesakes(config).items():
            word = shell_word(f"checkpoint.resume_from={step}")
            earlier = f"tier {tier} has checkpoints of an earlier one of this name"
            draft.note(f"a new run, which begins at step 0: {earlier}, and {word} goes on from the newest")


def _run(draft: _Draft) -> None:
    """Checks an existing run: what it has trained with decides what may change, and no job of it may live."""
    plan, config, paths = draft.plan, draft.plan.config, draft.paths
    if plan.new_run:
        _beside(draft)
        return
    # Here as well as in the lead: the job would end before its journal could say so.
    require_run_id(paths)
    draft.committed = committed = [info for info in list_checkpoints(paths) if info.kind == "committed"]
    check_records(paths, committed)
    plan.begun = begun = has_begun(paths) or bool(former_checkpoint(paths, config))
    former = _former(paths, config, begun=begun)
    # Before the comparison: the path of a built-in holds a hash of its builder, which differs after an upgrade.
    config = built_before(config, former)
    resharded = former.distributed.axes != config.distributed.axes
    # A step has the same number of responses on any number of ranks, so sizes per device follow the devices.
    if begun and resharded and not config.trainer.is_guest:
        config = keep_step(former, config)
        draft.note(reshaped(former, config))
    plan.config = config
    changed = _changes(paths, config, begun=begun)
    # Allowed, and said: in a longer run the rate of each step to come is another one.
    schedule = config.train.lr_schedule
    if begun and "train.steps" in changed and schedule in _BY_LENGTH:
        draft.note(f"train.steps changes the {schedule} schedule: learning rates differ from here on")
    refuse_living(paths, ask_for_unknown=draft.ask_slurm)
    if ended_well(paths):
        plan.done = why_done(config, committed)
        if config.trainer.is_guest:
            draft.note("the run has ended as done: it ends again at once, unless its program has more to do")
    draft.add(["the run's former configuration and job"])


def _resume_point(draft: _Draft) -> None:
    # It may read every byte of a checkpoint, and ask the user: not for a submission that is refused anyway.
    if draft.plan.new_run or draft.problems:
        return
    plan = draft.plan
    resume = find_resume(plan.config, draft.paths, draft.committed, draft.begin_again)
    plan.resumes_from, plan.resume_read, plan.begins_again = resume.name, resume.read, resume.lost
    draft.add([f"checkpoint {resume.name}: every byte"] if resume.read else [], [resume.note])


def _code(draft: _Draft) -> None:
    plan = draft.plan
    plan.code = plan_code(
        plan.config,
        draft.directory,
        draft.paths,
        begun=plan.begun,
        choice=draft.code,
        known=draft.trees,
        ask_python=not draft.not_run,
    )
    lines = "; ".join(plan.code.lines())
    draft.add([f"code {lines}"] if plan.code.record.trees else [], plan.code.notes)


def _frozen_inputs(draft: _Draft) -> None:
    config, paths = draft.plan.config, draft.paths
    wanted = config.checkpoint.resume_from
    resumed = draft.plan.resumes_from if wanted == "auto" else wanted
    if resumed and not config.trainer.is_guest:
        # With `--code new` a changed reward is a new copy, which the ranks refuse.
        moved = Moves.of(paths).config(config) if draft.code == "run" else config
        draft.note(*check_frozen_inputs(moved, paths, resumed))


def _verl(draft: _Draft) -> None:
    if draft.plan.config.trainer.backend == "verl":
        good, notes, draft.trained = check_verl(draft.plan.config, draft.paths, draft.committed)
        draft.add(good, notes)


def _room(draft: _Draft) -> None:
    # The newest committed checkpoint tells how much one takes.
    config, paths = draft.plan.config, draft.paths
    frozen = frozen_to_come(config, paths)
    draft.note(check_room(config, paths.checkpoints, draft.committed, frozen=frozen))


def _deadlines(draft: _Draft) -> None:
    if draft.slurm is not None:
        config, slurm = draft.plan.config, draft.slurm
        draft.add(*check_deadlines(config, draft.paths, draft.committed, slurm))
        draft.plan.avoids, notes = nodes_to_avoid(config, slurm)
        draft.note(*notes)


_WHOLE_RUN = ("configuration", "_directory", "_run")
_LOOKS: dict[Callable[[_Draft], None], tuple[str, ...]] = {
    _directory: ("name", "run_dir"),
    _packages: ("trainer", "slurm"),
    _rank_environment: ("env", "env_from_files", "slurm", "trainer", "_packages"),
    _hooks: ("hooks",),
    _services: ("services",),
    _group: ("group", "hooks"),
    _inputs: ("model", "data", "trainer", "distributed", "rollout", "_directory"),
    _resume_from: ("checkpoint", "trainer", "train", "_directory"),
    _container: ("slurm", "model", "data", "checkpoint"),
    lambda draft: draft.note(check_surroundings(draft.plan.config)): ("checkpoint", "run_dir", "_directory"),
    _keys: ("checkpoint",),
    lambda draft: draft.note(gpu_note(draft.plan.config, draft.plan.cluster)): ("distributed",),
    lambda draft: draft.note(check_metrics_port(draft.plan.config)): ("observability",),
    # Local questions come before Slurm's: without slurmctld a command of Slurm takes 9 s to say so.
    _slurm: ("slurm", "distributed", "run_dir"),
    _run: ("configuration", "_directory"),
    _resume_point: _WHOLE_RUN,
    _code: _WHOLE_RUN,
    _frozen_inputs: _WHOLE_RUN,
    _verl: ("verl", "trainer", "model", "data", "distributed", "slurm", "_directory", "_run"),
    _room: _WHOLE_RUN,
    _deadlines: _WHOLE_RUN,
}
"""The looks at a submission, in order, each with what it goes by: sections of the configuration, and other looks."""


def carry_out(
    plan: SubmissionPlan,
    *,
    prepare_only: bool = False,
    confirm_drift: Confirm | None = None,
    after: str = "",
) -> SubmissionResult:
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
    survey, drift = _confirmed_drift(plan, data_of(config), confirm_drift)
    notices = list(survey.notices) if survey is not None else []
    job_id: str | None = None
    with ExitStack() as held:
        # Callbacks run in reverse order: directories are removed last, when what was made in them is gone.
        with ExitStack() as undo:
            make_root(undo, paths.root)
            held.enter_context(only_submitter(paths))
            _require_as_planned(plan, paths, ask_for_unknown=plan.cluster == "slurm" and not prepare_only)
            _write_run(undo, plan, config)
            notices += _write_fingerprint(undo, plan, survey, drift)
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
        # After the job: a confirmed change whose submission failed has changed nothing.
        events: list[ev.Event] = [] if drift is None else [_accepted(drift)]
        events += [ev.ForceResume(lost=plan.begins_again)] if plan.begins_again else []
        events += copied
        if job_id is not None:
            # Still under the lock: the next submit learns of this job from the journal.
            events.append(ev.Submitted(plan.cluster, socket.gethostname(), plan.slurm, job_id=job_id))
            if plan.avoids:
                # Names no node: the user's record says how long. A requeue looks there again, and takes it back.
                detail = f"the job avoids {', '.join(plan.avoids)}"
                events.append(ev.Avoid([], detail, told=list(plan.avoids), job_id=job_id))
        for event in events:
            append_event(paths, event)
    return SubmissionResult(
        run_dir=str(paths.root),
        cluster=plan.cluster,
        job_id=job_id,
        new_run=plan.new_run,
        changed=tuple(changed),
        notes=(*plan.notes, *notices),
    )


def _require_as_planned(plan: SubmissionPlan, paths: RunPaths, *, ask_for_unknown: bool) -> None:
    """Requires that the run is still as the plan found it, which was made without the lock.

    Raises:
        Fenced: another submit has made the run, taken it back, or queued a job; or the run has begun.
    """
    if paths.run_yaml.exists() is plan.new_run:
        raise Fenced("another submit was faster", where=paths.root, remedy="submit again to see its run")
    refuse_living(paths, ask_for_unknown=ask_for_unknown)
    # A run that has not begun may change any key. What was saved since then would not fit the new ones.
    if not plan.begun and has_begun(paths):
        raise Fenced("the run has begun meanwhile", where=paths.root, remedy="submit again")


def _write_run(undo: ExitStack, plan: SubmissionPlan, config: RunConfig) -> None:
    """Writes directories, run.yaml and marks of the run."""
    paths = RunPaths(plan.run_dir)
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
    if not plan.begun and paths.orchestration.exists():
        # A start that came to nothing may have written the layout of the former configuration.
        keep_content(undo, paths.orchestration)
        paths.orchestration.unlink()


def _write_fingerprint(
    undo: ExitStack, plan: SubmissionPlan, survey: prints.Survey | None, drift: prints.Drift | None
) -> list[str]:
    """Records what the data was found to be; returns notes for the user."""
    paths = RunPaths(plan.run_dir)
    if survey is None:
        return []
    # Otherwise the record stays: it was read in full, and what is compared with it trusts sizes and dates.
    if drift is not None or not plan.begun or not paths.fingerprint.exists():
        keep_content(undo, paths.fingerprint)
        prints.write(paths, survey.found)
    # The cache shortens later looks alone: where it cannot be written, that is said, and the run starts.
    forgotten = prints.remember(paths.hash_cache, survey)
    return [forgotten] if forgotten else []


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


def _accepted(drift: prints.Drift) -> ev.ForceResume:
    return ev.ForceResume(list(drift.added), list(drift.removed), list(drift.changed))


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
