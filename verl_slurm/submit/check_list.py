"""What `submit` checks before it makes anything, and `doctor` of a cluster: the list, and the small checks of it.

Local questions come before Slurm's: without slurmctld a command of Slurm takes 9 s to say so.
"""

import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from verl_slurm.base.errors import CheckpointCorrupt, ConfigError, NotFound, SchemaMismatch
from verl_slurm.base.keys import Keyring, load_keys
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.packages import pip_install, require_packages
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.format.components import require_same_models
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.specification import Manifest
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.lost import former_checkpoint, require_run_id
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.checkpoint.store.recover import choose_resume, untrusted
from verl_slurm.checkpoint.store.run_config import trained_with
from verl_slurm.checkpoint.store.verify import read_manifest, verify, why_untrusted
from verl_slurm.checkpoint.tiers.survey import namesakes
from verl_slurm.checks import ANYTHING, Check, Finding, When, good, skipped, warn
from verl_slurm.checks.bad_nodes import folder, recall
from verl_slurm.checks.cluster_rules import SaveTime, judge_cluster, judge_deadlines
from verl_slurm.checks.storage_probe import PlaceReport, judge_place, probe_place
from verl_slurm.config.changes import LAYOUT_KEYS, may_change, refuse_changes
from verl_slurm.config.checks.rollout import check_engine, require_engine
from verl_slurm.config.elastic import keep_step, require_same_step
from verl_slurm.config.load import differences, load_resolved, parse_config
from verl_slurm.config.schema import BUILTIN, RunConfig
from verl_slurm.containers.image import pin_image
from verl_slurm.containers.runtimes import agents_inside, mounts
from verl_slurm.dataset.prompts.look import PromptsLook
from verl_slurm.journal.files import read_history
from verl_slurm.program.programs import Moves
from verl_slurm.runs.liveness import refuse_living
from verl_slurm.runs.run_record import ended_well, has_begun, steps_done
from verl_slurm.slurm.batch import asked_partition
from verl_slurm.submit.checks import model_files, run_directory, slurm_answers
from verl_slurm.submit.checks.code_trees import CodeChoice, TreesRead, plan_code
from verl_slurm.submit.checks.model_and_reward import (
    built_before,
    check_guest,
    check_names,
    check_remote_code,
    check_reward,
)
from verl_slurm.submit.checks.prompt_data import check_data, check_sides
from verl_slurm.submit.checks.ranks_environment import check_rank_environment
from verl_slurm.submit.checks.resume_point import (
    MOST_READ,
    check_frozen_inputs,
    check_records,
    find_resume,
    source_may_go,
)
from verl_slurm.submit.checks.user_programs import check_hooks, check_services, unexpanded_words
from verl_slurm.submit.checks.verl import check_verl
from verl_slurm.submit.executor import render_script
from verl_slurm.submit.relative_paths import Places, value_of, with_values
from verl_slurm.submit.submission_plan import Cluster, SubmissionPlan, reshaped, why_done
from verl_slurm.verl.verl_inputs import data_of
from verl_slurm.wire.http import read_token

# Forced: the build without CUDA has the wanted version already.
_CUDA_TORCH = pip_install("--force-reinstall", "-c", "constraints/cuda.txt", "torch")
_NOT_KNOWN = "whether a save is in time: the site chooses the job's partition"
# Schedules that end with the run (trainer/objective/optimizers.py).
_BY_LENGTH = ("linear", "cosine", "wsd")
# Linux, containers whose /proc hides the driver, WSL.
_SIGNS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


class Draft(msgspec.Struct, kw_only=True):
    """A plan in the making, which the checks look at and complete.

    Attributes:
        not_run: why nothing that the configuration names is run (`why_not_run`); empty: it is.
        code, trees, begin_again: as of `plan_submission`; `directory` is its `base`.
        is_new: the run is not there yet; None: not known.
        committed: checkpoints of the run, newest first.
        probed: storage that was tried, by place.
    """

    plan: SubmissionPlan
    written: RunConfig
    places: Places
    ask_slurm: bool = True
    not_run: str = ""
    directory: Path = Path()
    code: CodeChoice | None = None
    trees: TreesRead | None = None
    begin_again: Callable[[str], bool] | None = None
    drill: Callable[[slurm_answers.SlurmSays], Sequence[Finding]] | None = None
    is_new: bool | None = None
    slurm: slurm_answers.SlurmSays | None = None
    committed: list[CheckpointInfo] = []
    trained: str = ""
    probed: dict[Path, PlaceReport] = {}

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.plan.run_dir)

    @property
    def runs(self) -> RunConfig:
        """Returns the configuration with the programs that will run: with `--code run` the run's copies."""
        # Those outside may be gone.
        return Moves.of(self.paths).config(self.config) if self.code == "run" else self.config

    @property
    def answers(self) -> slurm_answers.SlurmSays:
        """Returns what Slurm has said."""
        assert self.slurm is not None
        return self.slurm

    def probe(self, place: Path) -> PlaceReport:
        """Tries a place, once for the directory that exists there or above."""
        there = next(folder for folder in (place, *place.parents) if folder.is_dir())
        if there not in self.probed:
            self.probed[there] = probe_place(place)
        return self.probed[there]


def source_note(source: Path) -> str:
    """Returns a warning about a configuration that other users own or may write; empty: none."""
    info = source.stat()
    # A group whose number equals the owner's is taken for the owner alone.
    writable = bool(info.st_mode & 0o002 or (info.st_mode & 0o020 and info.st_gid != info.st_uid))
    # Root and the owner of this very code can run anything as the submitter anyway.
    if info.st_uid in {0, os.geteuid(), os.stat(__file__).st_uid} and not writable:
        return ""
    # A configuration can run anything as its submitter.
    by = (
        f"others may write (mode {stat.S_IMODE(info.st_mode):04o})" if writable else f"uid {info.st_uid} owns"
    )
    return f"the configuration is {os.path.abspath(source)}, which {by}: it can have programs run as you"


def unexpanded(config: RunConfig) -> list[tuple[str, ConfigError]]:
    """Returns the keys with a text that a shell would expand, as the user wrote it, each with its error."""
    container = config.slurm.container
    paths = {
        "run_dir": config.run_dir,
        "model.path": config.model.path,
        "data.root": config.data.root,
        "data.eval_root": config.data.eval_root,
        "checkpoint.local_dir": config.checkpoint.local_dir,
        "observability.token_file": config.observability.token_file,
        "observability.targets_dir": config.observability.targets_dir,
        **{f"tiers[{number}].path": tier.path for number, tier in enumerate(config.tiers)},
    }
    if container is not None:
        paths["slurm.container.workdir"] = container.workdir
        paths |= {f"slurm.container.binds[{number}]": place for number, place in enumerate(container.binds)}
    # A variable that no shell expanded would become a directory's name.
    found = [
        ConfigError(
            "variables in paths are not expanded",
            where=key,
            found=path,
            expected="a path without `$`",
            remedy="write it out"
            if "[" in key
            else f'write it out, or let the shell do it: {key}="$VARIABLE/..." behind the configuration',
        )
        for key, path in paths.items()
        if path is not None and "$" in path
    ]
    found += unexpanded_words(config)
    return [(str(error.where).partition("[")[0], error) for error in found]


def _directory(draft: Draft) -> list[Finding]:
    run_directory.check_run_dir(draft.paths.root)
    # Asked of a directory that is ours alone.
    draft.is_new = draft.plan.new_run = not draft.paths.run_yaml.exists()
    return [good("run directory")]


def _followed(draft: Draft) -> list[Finding]:
    """Takes `auto` for a checkpoint that a file names, and that the run has gone back to already."""
    paths, wanted = draft.paths, draft.config.checkpoint.resume_from
    former = _former(paths, draft.config)
    # With the mark, no start has followed it yet.
    if former is None or former.checkpoint.resume_from != wanted or paths.resume_once.exists():
        return []
    draft.plan.followed = wanted
    draft.plan.config = with_values(draft.config, {"checkpoint.resume_from": "auto"})
    word = shell_word(f"checkpoint.resume_from={wanted or 'null'}")
    again = (
        "the run goes on from its newest checkpoint; give it as a word behind `submit` to go back once more"
    )
    return [warn(f"{word} was followed already", remedy=again)]


def _imported(config: RunConfig) -> tuple[str, ...]:
    # A guest brings packages of its own; torch is what saving its state needs.
    return ("torch",) if config.trainer.is_guest else ("torch", "transformers", "numpy")


def _packages(draft: Draft) -> list[Finding]:
    # Ranks run in the environment that submits. If they have a container of their own, the job finds out.
    wanted_by = f"a run with trainer.backend: {draft.config.trainer.backend}"
    require_packages(*_imported(draft.config), wanted_by=wanted_by)
    return []


def _set_up(draft: Draft) -> list[Finding]:
    return check_rank_environment(draft.config, _imported(draft.config), draft.not_run)


def _gpus(draft: Draft) -> list[Finding]:
    return check_gpus(draft.config, draft.plan.cluster)


def _asks_slurm(draft: Draft) -> bool:
    return draft.ask_slurm


def _drill(draft: Draft) -> list[Finding]:
    return [*draft.drill(draft.answers)] if draft.drill is not None else []


def _inputs(draft: Draft) -> list[Finding]:
    config, begun = draft.runs, has_begun(draft.paths)
    run_directory.refuse_below_inputs(draft.config)
    # First: `model_files.said_of` looks built-ins up by name, and an unknown one has no config.json.
    check_names(config)
    require_engine(config)
    # Built-ins are made after all checks, so there may be no directory yet.
    if not config.model.path.startswith(BUILTIN):
        model_files.check_model("model.path", Path(config.model.path), draft.written.model.path)
    said = model_files.said_of(config.model.path)
    check_engine(config, config.model.path, said)
    model_files.check_model_shape(config.distributed, config.model.path, said)
    notes = check_reward(config.model.reward, config)
    taken, looks = {"model": config.model.path}, dict[str, PromptsLook]()
    for name, key, root in (
        ("data", "data.root", config.data.root),
        ("held out", "data.eval_root", config.data.eval_root),
    ):
        if root is None:
            continue
        if root.startswith(BUILTIN):  # it may not be there yet, and needs no check
            taken[name] = root
            continue
        taken[name], said_of_data, looks[key] = check_data(config, key, begun=begun)
        notes += said_of_data
    if "data.root" in looks:
        taken["data"] += check_sides(config, looks["data.root"], looks.get("data.eval_root"))
    draft.plan.inputs = [*taken.items(), ("reward", config.model.reward)]
    notes += model_files.check_family(draft.config)
    unseen = check_remote_code(config, said)
    return [*(good(f"{name} {text}") for name, text in draft.plan.inputs), *map(warn, notes), *unseen]


def _program(draft: Draft) -> list[Finding]:
    run_directory.refuse_below_inputs(draft.config)
    found = check_guest(draft.runs)
    if data_of(draft.config) is None:
        found.append(skipped("whether the data stays the same between attempts; data.root names it"))
    return found


def _other_keys(config: RunConfig, checkpoint: Path, keys: Keyring | None, *, in_step: bool) -> str:
    """Returns what a run computes otherwise than the run whose checkpoint it goes on from; ConfigError: it cannot."""
    former = parse_config(CheckpointReader(checkpoint, keys).read("config.yaml"), f"{checkpoint}/config.yaml")
    require_same_step(former, config, where=checkpoint)
    changed = [
        f"{key}: {before!r} -> {after!r}"
        for key, before, after in differences(former, config)
        if not (may_change(key) or key in LAYOUT_KEYS or key in ("name", "run_dir", "distributed.device"))
    ]
    if changed and in_step:
        raise ConfigError(
            "a checkpoint of the midst of a step holds what was sampled for it, and goes on with the same values alone",
            where=checkpoint,
            found="; ".join(changed),
            remedy="name one of a step's end (no `_sp` in its name), or take the values back",
        )
    return f"from {checkpoint.name} on with other keys than before: {'; '.join(changed)}" if changed else ""


def check_resume_from(config: RunConfig) -> list[Finding]:
    """Checks the target of `checkpoint.resume_from`: its place, and its algorithm.

    Raises:
        NotFound: it is not there.
        ConfigError: it belongs to a run that trains other models, or has all steps of this one.
        DataError: it is an adapter.
        PermissionRefused: another user could have written it.
        CheckpointCorrupt, KeyRefused, SchemaMismatch: of at most `MOST_READ` bytes, it does not verify.
    """
    wanted = config.checkpoint.resume_from
    if wanted is None or wanted == "auto":
        return []
    named = CHECKPOINT_NAME.fullmatch(wanted)
    # A name means a checkpoint of this run; anything else is a path, of whichever run.
    paths = RunPaths(config.run_dir)
    path = paths.checkpoints / wanted if named else Path(wanted)
    if not path.is_dir():
        raise NotFound(
            "no such checkpoint to resume from",
            where=path,
            expected="a checkpoint directory, the name of one of this run, auto or null",
            remedy="set checkpoint.resume_from; `verl-slurm list RUN` lists a run's",
        )
    model_files.refuse_adapter("checkpoint.resume_from", path)
    notes, read, manifest = [] if named else [source_may_go(path)], "every byte", _manifest_of(path)
    if manifest is not None:
        require_same_models(manifest, config, path)
        if why := why_untrusted(path.stat()):
            raise untrusted(path, why)
        if not config.trainer.is_guest and not manifest.safe_point and manifest.step >= config.train.steps:
            raise ConfigError(
                "nothing is left to do after this checkpoint",
                where=path,
                found=f"step {manifest.step}, and train.steps={config.train.steps}",
                remedy="raise train.steps, which counts those of the checkpoint",
            )
    keys = load_keys(config.checkpoint.encryption)
    if manifest is not None and manifest.num_bytes > MOST_READ:
        read = "its manifest; the start reads every byte"
    else:
        verifier = partial(verify, keys=keys)
        notes.append(choose_resume(paths, wanted, move_damaged=False, verifier=verifier).strays)
    if manifest is not None and not named and not config.trainer.is_guest:
        notes.append(_other_keys(config, path, keys, in_step=bool(manifest.safe_point)))
    return [good(f"the checkpoint to resume from: {read}"), *map(warn, filter(None, notes))]


def _manifest_of(path: Path) -> Manifest | None:
    """Returns a checkpoint's manifest; None: it does not verify. NotFound: there is none."""
    try:
        return read_manifest(path)
    except FileNotFoundError:
        committed = [info.name for info in list_checkpoints(RunPaths(path)) if info.kind == "committed"]
        raise NotFound(
            "not a checkpoint to resume from",
            where=path,
            found="a run's directory" if committed else "a directory without a manifest",
            expected="the directory of one checkpoint",
            remedy=f"set {shell_word(f'checkpoint.resume_from={path}/checkpoints/{committed[0]}')}"
            if committed
            else "`verl-slurm list RUN` lists those of a run",
        ) from None
    except (CheckpointCorrupt, SchemaMismatch):  # its bytes are looked at next, and tell what is wrong
        return None


def check_container(config: RunConfig, cluster: Cluster) -> tuple[RunConfig, list[Finding]]:
    """Returns the configuration (paths absolute) with the image's digest in it, and what was checked.

    Raises:
        ConfigError: no such image, another one than the recorded, a path that cannot be mounted, or no Slurm for Pyxis.
    """
    if config.slurm.container is None:
        return config, []
    if agents_inside(config) and cluster != "slurm":
        raise ConfigError(
            "Pyxis is a plugin of Slurm's srun, and this run has no Slurm",
            where="slurm.container.runtime",
            found="pyxis, on this machine alone",
            expected="apptainer or podman",
            remedy="set slurm.container.runtime, or leave out --cluster local",
        )
    # The runtime is looked for on the nodes, where it is started.
    places = mounts(config)
    config = pin_image(config)
    container = config.slurm.container
    assert container is not None
    name = f"image {container.image}" + (f", {container.digest}" if container.digest else "")
    return config, [good(f"{name}, {len(places)} places to mount")]


def _container(draft: Draft) -> list[Finding]:
    draft.plan.config, found = check_container(draft.config, draft.plan.cluster)
    return found


def _keys(draft: Draft) -> list[Finding]:
    encryption = draft.config.checkpoint.encryption
    # Here, where the user sees it: the lead refuses a missing key after the wait in the queue.
    keys = load_keys(encryption)
    assert keys is not None
    assert encryption is not None
    keys.current.derive(b"verl-slurm preflight")  # raises if the package is missing
    found = [good("key", "there, and closed to others")]
    if draft.plan.cluster == "slurm" and encryption.key_env is not None:
        kept = (
            "sbatch hands the variable to slurmctld, which keeps it with the job "
            "(and in the accounting database with AccountingStoreFlags=job_env)"
        )
        found.append(warn("checkpoint.encryption.key_env", kept, "key_file does not travel"))
    return found


def check_metrics_port(config: RunConfig) -> list[Finding]:
    """Checks that the port's token exists and is private (`wire.http.read_token`), and whether others reach it."""
    wanted = config.observability
    if wanted.metrics_port is None:
        return []
    if wanted.token_file is not None:
        read_token(wanted.token_file)
    if wanted.metrics_host == "127.0.0.1":
        return []
    reached = "the whole network reaches the metrics of this run"
    by_others = "the token keeps others out, and travels in the clear"
    return [warn(f"observability.metrics_host {wanted.metrics_host}", reached, by_others)]


def check_gpus(config: RunConfig, cluster: Cluster, *, signs: Sequence[Path] = _SIGNS) -> list[Finding]:
    """Returns what speaks against `distributed.device: cuda`; one of the files `signs` tells of an NVIDIA driver.

    Raises:
        ConfigError: `--cluster local`, and no driver or a torch without CUDA.
    """
    if config.distributed.device != "cuda":
        return []
    try:
        # From its metadata: the command line does not import torch.
        torch = version("torch") if config.slurm.python is None else ""  # another Python's is not known here
    except PackageNotFoundError:
        torch = ""
    no_driver = not any(sign.exists() for sign in signs)
    # On Slurm the nodes may have another environment than the machine that submits, so there it is a note, and the
    # ranks refuse at their start (trainer.place). For this machine it is certain.
    if cluster == "local" and (torch.endswith("+cpu") or no_driver):
        raise ConfigError(
            "this machine cannot give the ranks a GPU",
            where="distributed.device=cuda",
            found="no NVIDIA driver" if no_driver else f"torch {torch}, built without CUDA",
            remedy="set distributed.device=cpu, or submit where there are GPUs"
            if no_driver
            else f"{_CUDA_TORCH}, or set distributed.device=cpu",
        )
    if torch.endswith("+cpu"):
        built = f"torch {torch} of this environment is built without CUDA: ranks that run in it will refuse"
        return [warn(f"distributed.device=cuda, and {built}", remedy=_CUDA_TORCH)]
    return []


def _slurm(draft: Draft) -> list[Finding]:
    draft.slurm = slurm_answers.ask_slurm(draft.config)
    draft.plan.slurm = draft.slurm.conf.get("ClusterName", "")
    notes = [
        *slurm_answers.shell_notes(draft.config, draft.slurm.conf, os.environ),
        *slurm_answers.place_notes(draft.config, draft.slurm.conf),
    ]
    return [good("Slurm"), *notes]


def _partition(draft: Draft) -> list[Finding]:
    found = slurm_answers.judge_partitions(draft.config, draft.answers)
    name = asked_partition(os.environ, draft.config)
    return [*([good(f"partition {name}")] if name else []), *found]


def _beside(draft: Draft) -> list[Finding]:
    config, found = draft.config, list[Finding]()
    # A new run may have been meant to go on with an earlier one.
    if other := draft.places.run_beside(draft.written.run_dir.replace("{name}", config.name)):
        meant = f"{other} exists beside the YAML; {shell_word(f'run_dir={other}')} means it"
        found.append(warn(f"a new run, since run_dir goes by where you are: {meant}"))
    if config.checkpoint.resume_from == "auto":
        for tier, step in namesakes(config).items():
            word = shell_word(f"checkpoint.resume_from={step}")
            earlier = f"tier {tier} has checkpoints of an earlier one of this name"
            found.append(
                warn(f"a new run, which begins at step 0: {earlier}, and {word} goes on from the newest")
            )
    return found


def _run(draft: Draft) -> list[Finding]:
    """Checks an existing run: what may change, and that no job of it lives."""
    plan, config, paths, found = draft.plan, draft.config, draft.paths, list[Finding]()
    # Here as well as in the lead: the job would end before its journal could say so.
    require_run_id(paths)
    draft.committed = committed = [info for info in list_checkpoints(paths) if info.kind == "committed"]
    check_records(paths, committed)
    plan.begun = begun = has_begun(paths) or bool(former_checkpoint(paths, config))
    former = _trained(paths, config, begun=begun)
    # Before the comparison: the path of a built-in holds a hash of its builder, which differs after an upgrade.
    config = built_before(config, former)
    resharded = former.distributed.axes != config.distributed.axes
    # A step has the same number of responses on any number of ranks, so sizes per device follow the devices.
    if begun and resharded and not config.trainer.is_guest:
        config = keep_step(former, config)
        found.append(warn(reshaped(former, config)))
    elif begun and resharded and config.trainer.backend == "command" and committed:
        now = counted(config.distributed.world_size, "rank")
        why = "the start refuses that unless the program says any_ranks=True (docs/guests.md)"
        found.append(warn(f"goes on with {now} instead of {former.distributed.world_size}: {why}"))
    plan.config = config
    changed = changed_keys(paths, config, begun=begun)
    # Allowed, and said: in a longer run the rate of each step to come is another one.
    schedule = config.train.lr_schedule
    if begun and "train.steps" in changed and schedule in _BY_LENGTH:
        found.append(warn(f"train.steps changes the {schedule} schedule: learning rates differ from here on"))
    refuse_living(paths, ask_for_unknown=draft.ask_slurm)
    found += [warn(event.text) for event in read_history(paths).foreign]
    if ended_well(paths):
        plan.done = why_done(config, committed)
        if config.trainer.is_guest:
            found.append(
                warn("the run has ended as done: it ends again at once, unless its program has more to do")
            )
    return [good("the run's former configuration and job"), *found]


def changed_keys(paths: RunPaths, config: RunConfig, *, begun: bool) -> list[str]:
    """Returns the keys that differ from what the run has trained with. ConfigError: one may not."""
    old = _trained(paths, config, begun=begun)
    return refuse_changes(old, config, paths.root, begun=begun, steps_done=steps_done(paths))


def _trained(paths: RunPaths, config: RunConfig, *, begun: bool) -> RunConfig:
    """Returns the configuration that the run has trained with; before it has begun, that of its run.yaml."""
    written = load_resolved(paths.run_yaml)
    if not begun:
        return written
    # run.yaml may have been edited while the job waited; compared with itself, no change would be found.
    return _former(paths, config) or written


def _former(paths: RunPaths, config: RunConfig) -> RunConfig | None:
    # Of the newest checkpoint, where the record of the newest ranks is missing or of another version.
    newest = next((info.path for info in list_checkpoints(paths) if info.kind == "committed"), None)
    return trained_with(paths, config, newest)


def _resume_point(draft: Draft) -> list[Finding]:
    plan = draft.plan
    resume = find_resume(plan.config, draft.paths, draft.committed, draft.begin_again)
    plan.resumes_from, plan.resume_read, plan.begins_again = resume.name, resume.read, resume.lost
    read = [good(f"checkpoint {resume.name}: every byte")] if resume.read else []
    return [*read, *([warn(resume.note)] if resume.note else [])]


def _code(draft: Draft) -> list[Finding]:
    plan, beside = draft.plan, draft.places.beside("trainer.command")
    by_itself = os.path.realpath(beside) == os.path.realpath(draft.paths.root)
    plan.code = plan_code(
        plan.config,
        draft.directory,
        draft.paths,
        begun=plan.begun,
        beside=None if by_itself else beside,
        choice=draft.code,
        known=draft.trees,
        ask_python=not draft.not_run,
    )
    lines = "; ".join(plan.code.lines())
    copied = [good(f"code {lines}")] if plan.code.record.trees else []
    return [*copied, *map(warn, plan.code.notes)]


def _frozen_inputs(draft: Draft) -> list[Finding]:
    wanted = draft.config.checkpoint.resume_from
    resumed = draft.plan.resumes_from if wanted == "auto" else wanted
    # With `--code new` a changed reward is a new copy, which the ranks refuse.
    return [*map(warn, check_frozen_inputs(draft.runs, draft.paths, resumed))] if resumed else []


def _verl(draft: Draft) -> list[Finding]:
    found, draft.trained = check_verl(draft.config, draft.paths, draft.committed)
    return found


def _room(draft: Draft) -> list[Finding]:
    # The newest committed checkpoint tells how much one takes.
    config, paths = draft.config, draft.paths
    frozen = run_directory.frozen_to_come(config, paths)
    note = run_directory.check_room(config, paths.checkpoints, draft.committed, frozen=frozen)
    return [warn(note)] if note else []


def _storage(draft: Draft) -> list[Finding]:
    # Tried, not read from tables of file systems: writes, renames, locks and modes on the very place.
    found = judge_place("run_dir", draft.probe(draft.paths.root), must_outlive_node=True)
    for tier in draft.config.tiers:
        # A bucket is no place of a file system; `verl-slurm tiers` asks it.
        if tier.path is not None:
            found += judge_place(f"tier {tier.name}", draft.probe(Path(tier.path)), must_outlive_node=True)
    return found


def _deadlines(draft: Draft) -> list[Finding]:
    slurm = draft.answers
    if slurm.partition is None:
        return [skipped(_NOT_KNOWN)]
    return judge_deadlines(slurm.conf, slurm.partition, draft.config, _save_time(draft), slurm.others)


def _cluster(draft: Draft) -> list[Finding]:
    slurm = draft.answers
    if slurm.partition is None:
        return [skipped(_NOT_KNOWN)]
    draft.committed = [info for info in list_checkpoints(draft.paths) if info.kind == "committed"]
    return judge_cluster(slurm.conf, slurm.partition, draft.config, _save_time(draft), slurm.others)


def _save_time(draft: Draft) -> SaveTime | None:
    return slurm_answers.save_time(draft.config, draft.paths, draft.committed, draft.probe)


def _avoided(draft: Draft) -> list[Finding]:
    draft.plan.avoids, found = slurm_answers.nodes_to_avoid(draft.config, draft.answers)
    return found


def _bad_nodes(draft: Draft) -> list[Finding]:
    cluster = draft.answers.conf.get("ClusterName", "")
    remembered, place = recall(cluster), folder(cluster)
    found = [warn("bad node", problem, "this record is passed over") for problem in remembered.problems]
    for node in remembered.nodes:
        forget = f"your runs avoid it; rm {shell_word(place / node.node)}.json ends that"
        found.append(warn("bad node", node.told, forget))
    return found


def _verdict(draft: Draft) -> list[Finding]:
    # The last question, since sbatch judges the very script that would be queued.
    return slurm_answers.judge_script(draft.config, render_script(draft.plan))


def _has(key: str) -> Callable[[Draft], bool]:
    return lambda draft: bool(value_of(draft.config, key) != value_of(RunConfig(), key))


def _sets_up(draft: Draft) -> bool:
    return any(
        _has(key)(draft) for key in ("env", "env_from_files", "slurm.modules", "slurm.setup", "slurm.python")
    )


def _runs_here(draft: Draft) -> bool:
    return draft.config.slurm.container is None and draft.config.slurm.python is None


def _is_guest(draft: Draft) -> bool:
    return draft.config.trainer.is_guest


def _resumes(draft: Draft) -> bool:
    return not draft.is_new or draft.config.checkpoint.resume_from not in (None, "auto")


def _names_checkpoint_by_file(draft: Draft) -> bool:
    key = "checkpoint.resume_from"
    return (
        not draft.is_new and draft.config.checkpoint.resume_from != "auto" and not draft.places.is_given(key)
    )


_Look = Callable[[Draft], list[Finding]]
_SUBMIT: tuple[When, ...] = ("submit",)
_DOCTOR: tuple[When, ...] = ("doctor",)
_BOTH: tuple[When, ...] = ("submit", "doctor")


def _submit(
    name: str, look: _Look, goes_by: Sequence[str], concerns: Callable[[Draft], bool] = lambda _: True
) -> Check[Draft]:
    return Check(name, _SUBMIT, look, tuple(goes_by), concerns)


def _of(check: Callable[[RunConfig], list[Finding]]) -> _Look:
    return lambda draft: check(draft.config)


_SLURM = ("slurm", "distributed", "run_dir")
_RUN = ("configuration", "run directory", "earlier run")
_OF_VERL = ("verl", "trainer", "model", "data", "distributed", "slurm", "run directory", "earlier run")
_OF_MODEL = ("model", "data", "trainer", "distributed", "rollout", "run directory")
CHECKS: tuple[Check[Draft], ...] = (
    _submit("run directory", _directory, ("name", "run_dir")),
    # First: what is looked at after it goes by where the run goes on from.
    _submit(
        "whether the run has gone back already",
        _followed,
        ("checkpoint", "run directory"),
        _names_checkpoint_by_file,
    ),
    Check("storage", _DOCTOR, _storage),
    _submit("packages", _packages, ("trainer", "slurm"), _runs_here),
    _submit(
        "the ranks' environment", _set_up, ("env", "env_from_files", "slurm", "trainer", "packages"), _sets_up
    ),
    _submit("hook programs", _of(check_hooks), ("hooks",), _has("hooks")),
    _submit("service programs", _of(check_services), ("services",), _has("services")),
    _submit("group", _of(run_directory.check_group), ("group", "hooks"), _has("group")),
    _submit("model, data and reward", _inputs, _OF_MODEL, lambda draft: not _is_guest(draft)),
    _submit("program and data", _program, ("data", "trainer", "run directory"), _is_guest),
    _submit(
        "the checkpoint to resume from",
        _of(check_resume_from),
        ("checkpoint", "trainer", "train", "run directory"),
        lambda draft: draft.config.checkpoint.resume_from not in (None, "auto"),
    ),
    _submit("container image", _container, ("slurm", "model", "data", "checkpoint"), _has("slurm.container")),
    Check(
        "directories above the run",
        _BOTH,
        _of(run_directory.check_surroundings),
        ("checkpoint", "run_dir", "run directory"),
    ),
    Check("key", _BOTH, _keys, ("checkpoint",), _has("checkpoint.encryption")),
    _submit("GPUs", _gpus, ("distributed",), lambda draft: draft.config.distributed.device == "cuda"),
    _submit("metrics port", _of(check_metrics_port), ("observability",), _has("observability.metrics_port")),
    Check("Slurm", _BOTH, _slurm, _SLURM, _asks_slurm),
    Check("partition", _BOTH, _partition, (*_SLURM, "Slurm"), _asks_slurm),
    Check("Slurm's settings", _DOCTOR, _cluster, ("Slurm",)),
    Check("bad nodes", _DOCTOR, _bad_nodes, ("Slurm",)),
    # Before it the partition: one that can never run the job would never run the drill's.
    Check("fire drill", _DOCTOR, _drill, ("Slurm", "partition"), lambda draft: draft.drill is not None),
    _submit(
        "earlier runs of this name",
        _beside,
        ("configuration", "run directory"),
        lambda draft: draft.is_new is True,
    ),
    _submit("earlier run", _run, ("configuration", "run directory"), lambda draft: not draft.is_new),
    # It may read every byte of a checkpoint, and ask the user: not for a submission that is refused anyway.
    _submit(
        "the checkpoint that it goes on from",
        _resume_point,
        (*_RUN, ANYTHING),
        lambda draft: not draft.is_new,
    ),
    _submit("code", _code, _RUN),
    _submit(
        "whether what does not train is as it was",
        _frozen_inputs,
        (*_RUN, ANYTHING),
        lambda draft: _resumes(draft) and not _is_guest(draft),
    ),
    _submit(
        "verl's settings, and what they name",
        _verl,
        _OF_VERL,
        lambda draft: draft.config.trainer.backend == "verl",
    ),
    _submit("room on the disk", _room, _RUN),
    _submit("deadlines", _deadlines, (*_RUN, "Slurm"), _asks_slurm),
    _submit("nodes to stay away from", _avoided, (*_RUN, "Slurm"), _asks_slurm),
    _submit("Slurm's verdict on the job", _verdict, (ANYTHING,), _asks_slurm),
)
"""In order. Those of doctor need no earlier run, and change no plan."""
