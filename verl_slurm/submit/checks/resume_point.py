"""Looks for the checkpoint that a run which is submitted again goes on from."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import DATA_FILES, SOURCE, decode_json, read_regular
from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt, DataError, Fenced, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import read_owner
from verl_slurm.base.keys import load_keys
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import files_below
from verl_slurm.checkpoint.decide.best import Best
from verl_slurm.checkpoint.decide.retention import plan_prune
from verl_slurm.checkpoint.format.info import CheckpointInfo, Verdict
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.lost import (
    former_checkpoint,
    found_elsewhere,
    gone_back,
    lost_error,
    lost_rollouts,
    steps_between,
)
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.checkpoint.tiers.fetch import newer_in_tiers
from verl_slurm.config.load import load_resolved
from verl_slurm.config.reward_spec import parse_reward, source_file
from verl_slurm.config.schema import BUILTIN, RunConfig
from verl_slurm.dataset.fingerprint.data_record import (
    DataPlace,
    GlobPlace,
    data_place,
    fingerprint,
    narrowed,
    root_of,
)
from verl_slurm.dataset.fingerprint.entries import recorded_tree
from verl_slurm.dataset.prompts.choice import data_names
from verl_slurm.journal.files import read_history
from verl_slurm.runs.liveness import refuse_living
from verl_slurm.wire.reward_plan import read_reward_plan

# Bytes of checkpoints that `submit` reads: seconds. The lead reads each byte in any case.
MOST_READ = 1 << 30
_FORMER = "the journal never told of it, so the run directory was put back to a former copy of itself"


class ResumeFound(msgspec.Struct, frozen=True):
    """What a run that is submitted again goes on from."""

    name: str | None = None
    """None: from step 0."""
    read: bool = False
    """Every byte of it is as it was written. False: it is too large to be read here."""
    lost: str = ""
    """What tells that it had a checkpoint, where it has none that can be used."""
    note: str = ""


def check_records(paths: RunPaths, committed: Sequence[CheckpointInfo]) -> None:
    """Raises CheckpointCorrupt for a damaged record that the job reads at its start; `committed`: newest first."""
    read_owner(paths)
    read_reward_plan(paths)
    try:
        _read_object(paths.orchestration)
    except FileNotFoundError:
        return
    except UNREADABLE as error:
        copy = None
        for info in committed:
            # An encrypted checkpoint has no copy that could be put back as it is.
            with suppress(OSError, *UNREADABLE):
                _read_object(info.path / paths.orchestration.name)
                copy = info.path / paths.orchestration.name
                break
        raise CheckpointCorrupt(
            "the orchestration state cannot be read",
            where=paths.orchestration,
            found=error,
            remedy=f"`cp -f {shell_word(copy)} {shell_word(paths.orchestration)}` puts back what the first start wrote"
            if copy is not None
            else f"`rm -f {shell_word(paths.orchestration)}`: no checkpoint has a copy; the next start writes it anew",
        ) from None


def _read_object(path: Path) -> None:
    decode_json(read_regular(path, DATA_FILES), dict[str, object], DATA_FILES)


def check_frozen_inputs(config: RunConfig, paths: RunPaths, name: str) -> list[str]:
    """Refuses what does not train and is not what the run was trained with; returns notes.

    Args:
        config: of the native trainer, as its ranks would read it.
        name: the checkpoint that the run goes on from, of this run or an absolute path.

    Raises:
        DataError: model, reward, what is held out, or chat template has changed; of another run's that is a note.
    """
    try:
        manifest = read_manifest(paths.checkpoints / name)
        was = manifest.frozen
        switches = read_reward_plan(paths).switches
    except (OSError, VerlSlurmError):  # the lead says what is wrong with it
        return []
    notes, changed = list[str](), dict[str, tuple[str, str]]()
    trees = {"reference": config.model.path, "eval_data": config.data.eval_root or ""}
    globs = {"eval_data": config.data.eval_files}
    files = {"chat_template": config.data.chat_template}
    # The last replacement is in force, or will be made again.
    reward, expected = config.model.reward, was.get("reward", "")
    if switches:
        reward, expected = switches[-1].reward, switches[-1].digest
    if (spec := parse_reward(reward)) is not None and spec.kind == "classifier":
        trees["reward"] = spec.name
    elif spec is not None and spec.kind != "rule":
        files["reward"] = str(source_file(spec))
    # A rule is of this package, and has no digest.
    if (spec is not None and spec.kind == "rule") == bool(expected):
        changed["reward"] = reward, expected or "a rule"
    for role, digest in {**was, "reward": expected}.items():
        if not digest or trees.get(role, "").startswith(BUILTIN):
            continue
        differs: str | None = None
        if role in files:
            try:
                now = sha256(read_regular(Path(files[role]), SOURCE, follow=True)).hexdigest()
            except (OSError, ValueError):
                continue
            differs = "" if now == digest else f"{files[role]} has SHA-256 {now}"
        elif trees.get(role):
            differs = _changed(paths, data_place(trees[role], globs.get(role)), digest)
        else:
            continue
        if differs is None:
            notes.append(
                f"not looked at: whether each byte of {trees[role]} is as it was; the ranks read all"
            )
        elif differs:
            changed[role] = differs, digest
    if changed:
        # Of a file the run's copy of the code has the former one.
        copied = "reward" in files and not switches and paths.code_record.exists()
        error = _changed_inputs(paths, name, changed, copied=copied)
        if not Path(name).is_absolute() or manifest.safe_point:
            raise error
        notes.append(f"{error.what}: {error.found}")  # this run branches off
    return notes


def _changed_inputs(
    paths: RunPaths, name: str, changed: Mapping[str, tuple[str, str]], *, copied: bool
) -> DataError:
    replace = f"`verl-slurm update-reward --checkpoint {shell_word(paths.root)} --new-model NEW`"
    there = shell_word(f"checkpoint.resume_from={(paths.checkpoints / name).parent}/NAME")
    return DataError(
        f"what does not train is not what the run was trained with: {', '.join(changed)}",
        where=paths.checkpoints / name,
        found="; ".join(said for said, _ in changed.values()),
        expected=", ".join(digest for _, digest in changed.values()),
        remedy=f"--code run goes on with the run's own reward; to replace that, {replace}, and then --code run"
        if copied and set(changed) == {"reward"}
        else f"put it back as it was, or begin a new run with it: name=NEW run_dir=NEW {there}, one of a step's end; "
        f"to replace a reward, put the former one back, and then {replace}",
    )


def _changed(paths: RunPaths, place: DataPlace, digest: str) -> str | None:
    """Returns how a tree differs from the recorded one; empty: not at all; None: too large to be read, of equal
    sizes.
    """
    tree = root_of(place)
    if not tree.is_dir():  # e.g. a built-in model, which is built again
        return None
    try:
        sizes = {path: info.st_size for path, info in files_below(tree, follow=True).items()}
        record = recorded_tree(paths.frozen, digest)
        record = record and narrowed(record, place)
        # First: it names the file.
        for path, entry in record.files.items() if record is not None else ():
            if entry.kind == "file" and sizes.get(path) != entry.size:
                return f"{tree / path} has {sizes.get(path, 'no')} bytes, not {entry.size}"
        pattern = place.pattern if isinstance(place, GlobPlace) else None
        if sum(sizes[name] for name in data_names(sizes, pattern)) <= MOST_READ:
            now = fingerprint(place)
            if now.digest == (record.digest if record else digest):
                return ""
            was = record.files if record is not None else now.files
            named = sorted(name for name in was.keys() | now.files if was.get(name) != now.files.get(name))
            return f"{tree / named[0]} is another, or new" if named else f"{tree} has the digest {now.digest}"
    except (OSError, DataError) as error:
        return str(error)
    return None


class _TooLarge(Exception):
    pass


def source_may_go(checkpoint: Path) -> str:
    """Returns a warning about a checkpoint of another run that lives, and may remove it; empty: none known."""
    checkpoint = checkpoint.resolve()
    source = RunPaths(checkpoint.parent.parent)
    if checkpoint.parent != source.checkpoints or not source.run_yaml.is_file():
        return ""
    removes = removed_by_living(source, checkpoint.name, soon=False)
    copy = f"cp -a {shell_word(checkpoint)} DIR, then checkpoint.resume_from=DIR/{checkpoint.name}"
    return removes and f"checkpoint.resume_from: {removes}, maybe before this job starts: {copy}"


def removed_by_living(run: RunPaths, name: str, *, soon: bool) -> str:
    """Says that a run lives and will remove its checkpoint `name`; empty: not that we know.

    `soon`: with its next save, by all that its retention keeps now. Otherwise when `keep_last` has passed over it.
    """
    # A note, so nothing that is wrong with the run, or with Slurm, which is asked again, is an error of the caller's.
    with suppress(VerlSlurmError, OSError, ValueError):
        try:
            refuse_living(run)
            return ""
        except Fenced as error:
            living = error.found
        kept = load_resolved(run.run_yaml).checkpoint
        infos = [info for info in list_checkpoints(run) if info.kind == "committed"]
        # As if a newer one were there. One that is among the best now (`keep_best`) need not stay it.
        newest = max(infos, key=lambda info: info.order)
        to_come = replace(newest, step=newest.step + 1, name=f"step_{newest.step + 1:06d}")
        last, best = (kept.keep_last, Best.of(kept)) if soon else (1, None)
        plan = plan_prune([*infos, to_come], last, keep_every=kept.keep_every, best=best)
        if name in {one.name for one in plan.drop}:
            when = "with one of its next saves" if soon else f"once it has {kept.keep_last} newer ones"
            return f"{run.root} lives ({living}) and removes {name} {when} (keep_last)"
    return ""


def find_resume(
    config: RunConfig,
    paths: RunPaths,
    committed: Sequence[CheckpointInfo],
    begin_again: Callable[[str], bool] | None,
) -> ResumeFound:
    """Looks for the checkpoint that the job would go on from, as its lead does. Changes nothing.

    Args:
        committed: checkpoints of the run, newest first.
        begin_again: called if the run has lost all of them, with what tells that it had one; None: refuse.

    Raises:
        CheckpointsLost: it has had one, has none that can be used, and the user did not confirm.
        CheckpointCorrupt, KeyRefused, PermissionRefused, SchemaMismatch: one cannot be judged, so that nothing older is
            taken for it.
    """
    wanted = config.checkpoint.resume_from
    if wanted != "auto":
        return ResumeFound(wanted and Path(wanted).name, note=_given_up(paths, wanted, committed))
    keys, left = load_keys(config.checkpoint.encryption), MOST_READ
    sizes = {info.name: info.num_bytes for info in committed}

    def read(path: Path) -> Verdict:
        nonlocal left
        left -= sizes.get(path.name, 0)
        if left < 0:
            raise _TooLarge(path.name)
        return verify(path, keys=keys)

    try:
        choice = choose_resume(paths, "auto", move_damaged=False, verifier=read)
    except _TooLarge as error:
        return ResumeFound(str(error), note=_again(config, paths, str(error)))
    damaged = "; ".join(verdict.one_line() for verdict in choice.verdicts[:1] if not verdict.is_whole)
    if choice.name is not None:
        notes = choice.strays, _again(config, paths, choice.name, damaged)
        return ResumeFound(choice.name, read=True, note="; ".join(filter(None, notes)))
    trace = former_checkpoint(paths, config)
    if trace and (where := found_elsewhere(config)):
        note = f"no checkpoint in {paths.checkpoints} can be used ({damaged or trace})"
        without = f"ends with {int(ExitCode.CORRUPT)} without one"
        return ResumeFound(note=f"{note}: the job looks for one in {where}, and {without}")
    lost = trace and (damaged or trace)
    if lost and (begin_again is None or not begin_again(lost)):
        raise lost_error(paths, lost)
    return ResumeFound(lost=lost, note="" if lost else _again(config, paths, ""))


def _given_up(paths: RunPaths, wanted: str | None, committed: Sequence[CheckpointInfo]) -> str:
    """Returns what a start from the checkpoint that the user named (None: from nothing) takes out of use."""
    named = "" if wanted is None else Path(wanted).name
    order, other = checkpoint_order(named) or (-1, -1), False
    if wanted is not None and named != wanted:
        other = _digest(Path(wanted)) != _digest(paths.checkpoints / named)
    newer = [info.name for info in committed if (info.step, info.safe_point) > order]
    lost = []
    if newer:
        what = (
            f"{counted(len(newer), 'newer checkpoint')} up to {newer[0]} will be moved to {paths.quarantine}"
        )
        lost.append(f"{what}, and {steps_between(named, newer[0])} done again")
    # Other weights have sampled them.
    if other and any(paths.ledger.glob("*.ledger")):
        lost.append(f"the rollouts in {paths.ledger} will be set aside")
    if not lost:
        return ""
    word = shell_word(f"checkpoint.resume_from={wanted or 'null'}")
    way = [f"`checkpoint.resume_from=auto` goes on from {newer[0]}"] if newer else []
    return f"{word} goes back: {'; '.join([*lost, *way])}"


def _digest(checkpoint: Path) -> str:
    with suppress(OSError, VerlSlurmError):  # the lead says what is wrong with it
        return read_manifest(checkpoint).digest
    return ""


def _again(config: RunConfig, paths: RunPaths, name: str, damaged: str = "") -> str:
    """Returns what a start from checkpoint `name` does again; `damaged` is the verdict on a newer one."""
    newer, tier = newer_in_tiers(paths, config, name) if name else ("", "")
    if newer:
        return "; ".join(
            filter(
                None,
                (damaged, f"the next start takes {newer} from tier {tier}, newer than {name}: {_FORMER}"),
            )
        )
    history = read_history(paths)
    lost = gone_back(paths, history, name, config)
    if lost:  # later a copy is of no use any more
        lost += ", unless you bring it back first (a backup, checkpoints/quarantine)"
    elif damaged:  # the journal has no word of it
        lost = f"the run goes back to {name}, and does the steps after it again"
    return "; ".join(filter(None, (damaged, lost, lost_rollouts(paths, config, history, name))))
