"""`verl-slurm verify`, `inspect` and `fingerprint`: what checkpoints and data hold, and whether that is as it was."""

from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from verl_slurm.base.errors import NotFound, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import Keyring
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.inspect.compare import SUBJECTS, compare, difference
from verl_slurm.checkpoint.inspect.describe import describe
from verl_slurm.checkpoint.store.catalog import (
    list_checkpoints,
    newest_checkpoint,
    no_checkpoint,
    removed_meanwhile,
    unless_removed,
)
from verl_slurm.checkpoint.store.frozen import frozen_digests
from verl_slurm.checkpoint.store.lost import gone_back
from verl_slurm.checkpoint.store.run_config import keys_at_hand, keys_for
from verl_slurm.checkpoint.store.scrub import ScrubResult, scrub_frozen, scrub_one
from verl_slurm.cli.command_options import PLACE, RUN, Number, command, flag, key_option, option
from verl_slurm.cli.show import render
from verl_slurm.cli.show.run_tables import sparkline
from verl_slurm.config.load import load_resolved
from verl_slurm.dataset.fingerprint import data_record as prints
from verl_slurm.dataset.fingerprint.cache import default_path
from verl_slurm.journal.files import read_history
from verl_slurm.verl.verl_inputs import data_of

_UNCHECKED = "not checked"


@command("CORRUPT KEY DATA DATASET_DRIFT NOT_FOUND")
@click.argument("place", type=PLACE)
@flag("--scrub", "All that a run would need one day; set aside what is damaged.")
@flag("--dry-run", "With --scrub: read everything, set nothing aside.")
@flag("--no-data", "With --scrub: leave the data set out.")
@option("--rate", Number(min=0.1), "Read no faster than this.", metavar="MB/S")
@key_option("The key that signed them, instead of what the run says.")
@flag("--without-key", "Do not ask who made them: their bytes need no key.")
def verify(
    place: Path,
    scrub: bool,
    dry_run: bool,
    no_data: bool,
    rate: float | None,
    key_file: Path | None,
    without_key: bool,
    as_json: bool,
) -> int:
    """Read checkpoints back, every byte, and hold them against their manifests.

    PLACE is a run (all its committed checkpoints) or one checkpoint directory. Every file that is missing, extra, cut,
    altered or a link is named. Where the run has a key, each manifest must be signed with it. Encrypted files are
    checked as they lie on disk. Nothing is changed without --scrub.

    --scrub reads all that the run would need one day: its checkpoints, partial ones too, the copies of models that do
    not train (RUN/frozen), and the data set in full, so a change behind an unchanged size and mtime is found. What is
    damaged beyond doubt is set aside (checkpoints/quarantine, frozen/quarantine): a resume takes the checkpoint before
    at once, the next start makes a new copy of the model. Where a checkpoint is whole and holds more than its
    manifest names, that alone is moved. What cannot be read, what others may write, and what is not
    signed with the run's key is named and left. Where that key cannot be read here, the bytes are checked all the
    same, and `signature not checked: no key` is said. The daemon of a running job does the same with one checkpoint
    after the other (checkpoint.scrub_every_h), and brings the second copy of a damaged one home where the nodes have
    one (checkpoint.local_dir).

    \b
    verl-slurm verify runs/big
    verl-slurm verify runs/big --scrub --rate 200
    verl-slurm verify runs/big --scrub --dry-run --no-data --json
    """
    if (dry_run or no_data) and not scrub:
        raise click.UsageError("--dry-run and --no-data go with --scrub.")
    run = RUN.convert(place, None, None) if scrub else None
    # Before the first byte is read: a key that is missing would otherwise show after hours.
    if without_key:
        keys, missing = None, "--without-key"
    # A login node may lack the key. Damage is found without it, and what was not asked is said.
    else:
        keys, missing = keys_at_hand(place, key_file) if scrub else (keys_for(place, key_file), "")
    bar = render.Bar(enabled=not as_json)
    aside = f"what was found damaged is set aside; `verl-slurm list {shell_word(place)}` shows it"
    with nullcontext() if run is None or dry_run else render.told_if_interrupted(aside):
        read = _read_back(
            _checkpoints_of(place) if run is None else _checkpoints_of_run(run, partial=True),
            run,
            bar,
            keys=keys,
            set_aside=scrub and not dry_run,
            bytes_per_s=rate and rate * 1e6,
            as_json=as_json,
        )
    bar.close()
    lost = lost_newer(RunPaths(place)) if (place / "run.yaml").is_file() else ()
    everything = [row for rows in read.values() for row in rows]
    # Of all checkpoints together: one that is signed is enough to say that its signature was not asked.
    is_signed = any(one.is_signed for _, one in read["checkpoints"])
    missing = missing or ("the run is configured with none" if is_signed else "")
    signature = "checked" if keys else f"{_UNCHECKED}: no key ({missing})" if missing else "none"
    if not as_json and signature.startswith(_UNCHECKED):
        render.warning(f"signature {signature}")
    good = all(one.is_good for _, one in everything)
    # After the checkpoints, which a resume needs first.
    bar.show("reading the data")
    drifted, code = ([], ExitCode.OK) if run is None or no_data else _drift(run)
    bar.close()
    if as_json:
        answer: dict[str, Any] = {"ok": good and not drifted, "signature": signature, "lost": lost}
        answer |= {kind: [_facts(path, one) for path, one in rows] for kind, rows in read.items()}
        render.json_value(answer | ({} if run is None else {"data": drifted}))
    else:
        for line in drifted:
            render.line(f"data: {line}")
    if good:
        return code
    # Damage outweighs a missing signature: a key that is found later repairs no byte. Both outweigh data that changed:
    # a resume needs the checkpoint first.
    needs_key = all(one.is_good or one.verdict.needs_key for _, one in everything)
    return ExitCode.KEY if needs_key else ExitCode.CORRUPT


_Read = dict[str, list[tuple[Path, ScrubResult]]]


def _read_back(
    sizes: dict[Path, int],
    run: RunPaths | None,
    bar: render.Bar,
    *,
    keys: Keyring | None,
    set_aside: bool,
    bytes_per_s: float | None,
    as_json: bool,
) -> _Read:
    read: _Read = {"checkpoints": []}
    removed: list[str] = []

    def take(kind: str, path: Path, one: ScrubResult) -> None:
        name = path.name if run is None else str(path.relative_to(run.root))
        # A living run has pruned it since it was listed: no damage, and no verdict either.
        if one.gone:
            removed.append(name)
            return
        read[kind].append((path, one))
        # At once: whatever ends this command later, what was set aside has been said.
        if not as_json:
            bar.close()
            _tell(name, one)

    # Before anything is moved: a link in the place of RUN/frozen is refused.
    frozen = [] if run is None else frozen_digests(run)
    done = 0
    # All of them, whatever the first ones say: the answer is a list of what is wrong.
    for path, num_bytes in sizes.items():
        bar.show("reading back", done, sum(sizes.values()))
        take("checkpoints", path, scrub_one(path, set_aside=set_aside, keys=keys, bytes_per_s=bytes_per_s))
        done += num_bytes
    if run is not None:
        read["frozen"] = []
        bar.show("reading back frozen models")
        for name in frozen:
            one = scrub_frozen(run, name, set_aside=set_aside, bytes_per_s=bytes_per_s)
            take("frozen", run.frozen / name, one)
    # Nothing is good of which nothing was read. What is damaged is told all the same.
    if not read["checkpoints"] and all(one.verdict.ok for rows in read.values() for _, one in rows):
        raise removed_meanwhile(next(iter(sizes)))
    bar.close()
    for name in removed:
        render.warning(f"{name} was removed while it was read, as by the keep_last of a run that lives")
    return read


def _facts(path: Path, one: ScrubResult) -> dict[str, object]:
    facts = render.picked(one.verdict, "name problems num_bytes seconds") | {"ok": one.is_good}
    moved = {"set_aside": one.set_aside and str(one.set_aside), "not_set_aside": one.not_moved}
    return facts | {"path": str(path)} | moved


def _tell(name: str, one: ScrubResult) -> None:
    if one.is_good:
        size = one.verdict.num_bytes / 1e6
        render.line(f"{name}  verified, {size:.1f} MB in {one.verdict.seconds:.2f} s")
    for problem in one.verdict.problems:
        render.line(f"{name}  BAD {problem.path}: {problem.what}")
    if one.verdict.has_strays and one.set_aside is None:
        render.line(
            f"{name}  its own files are whole; `verl-slurm verify RUN --scrub` moves the others aside"
        )
    if one.set_aside is not None:
        render.line(f"{name}  set aside: {'/'.join(one.set_aside.parts[-3:])}")
    if one.not_moved:
        render.line(f"{name}  not set aside: {one.not_moved}")


def _drift(run: RunPaths) -> tuple[list[str], ExitCode]:
    """Returns how the data has changed, or why it was not looked at, and the exit code that says so."""
    try:
        old, root = prints.read(run), data_of(load_resolved(run.run_yaml))
        if root is None:
            return [], ExitCode.OK  # a program whose data is its own
        if old is None:
            remedy = "the next start records it anew"
            raise NotFound("its record is gone", where=run.fingerprint, remedy=remedy)
        # In full: what a scrub looks for, such as a bad disk, changes bytes and leaves size and times.
        seen = prints.survey(root, cache=run.hash_cache, full=True)
    except VerlSlurmError as error:
        return [f"not looked at: {error.one_line()}"], error.exit_code
    except OSError as error:
        return [f"not looked at: {error}"], ExitCode.DATA
    drift = asdict(seen.drift_from(old))
    lines = [f"{kind} {name}" for kind, names in drift.items() for name in names]
    return lines, ExitCode.DATASET_DRIFT if lines else ExitCode.OK


@command("DATA DATASET_DRIFT NOT_FOUND")
@click.argument("place", type=PLACE)
@option("--against", RUN, "Compare with the data that this run started with.")
@flag("--full", "Read every file, whatever is remembered of it.")
def fingerprint(place: Path, against: RunPaths | None, full: bool, as_json: bool) -> int:
    """The SHA-256 tree hash of a data set; of a run, whether its data has changed since its first start.

    PLACE is a data directory, or a run: then its data root is hashed and compared. On drift every added,
    removed and changed file is listed, and the exit code is 16.

    A file with the same path, inode, size, mtime and ctime as at the last look is not read again
    (remembered in RUN/.dataset_hashes, or below ~/.cache/verl-slurm for a directory), unless it was younger than
    a minute then, or lies on a file system whose ctime proves nothing (FUSE, SMB, images). To set an old mtime
    after a change does not hide it, as that moves ctime. What can hide it: a clock set back, bytes changed
    below the file system (bad disk, restored image), a write through a mapping on tmpfs, and on NFS, for a
    minute, another node's write. --full reads every byte all the same, and names the files whose content
    changed behind an unchanged stamp.
    """
    # A directory by itself has its cache in the user's own; a run keeps it beside its fingerprint.
    root: prints.DataPlace = place
    cache = default_path(place)
    if (place / "run.yaml").is_file():
        # A run is compared with its own first start unless another run is named.
        against = against or RunPaths(place.resolve())
        # A guest's loop may know its data by itself.
        known = data_of(load_resolved(place / "run.yaml"))
        if known is None:
            where, remedy = place / "run.yaml", "set data.root, or give the data's directory"
            raise NotFound("the run was not told which data it has", where=where, remedy=remedy)
        root, cache = known, RunPaths(place.resolve()).hash_cache
    elif against is not None and isinstance(
        its := data_of(load_resolved(against.run_yaml)), prints.GlobPlace
    ):
        root = prints.data_place(place, its.pattern)  # the record has no other files
    seen = prints.survey(root, cache=cache, full=full)
    now = seen.found
    for notice in (*seen.notices, prints.remember(cache, seen)):
        if notice:
            render.warning(notice)
    for name in seen.unnoticed:
        render.warning(f"{name}: the content changed, its size and times did not (found by --full)")
    old = None if against is None else prints.read(against)
    # After the survey, so that its notices are told even where there is nothing to compare with.
    if against is not None and old is None:
        remedy = "it gets one when it is submitted"
        raise NotFound("the run has no fingerprint yet", where=against.fingerprint, remedy=remedy)
    changes = {} if old is None else asdict(seen.drift_from(old))
    # Without a fingerprint to compare with nothing has changed, and the exit code is 0.
    same = not any(changes.values())
    if as_json:
        answer: dict[str, Any] = {
            "root": prints.place_of(root),
            "digest": now.digest,
            "num_files": len(now.files),
            "num_read": seen.num_read,
            "unnoticed": list(seen.unnoticed),
        }
        render.json_value(answer if old is None else answer | {"same": same} | changes)
    else:
        render.line(f"{now.digest}  {root}  {counted(len(now.files), 'file')}, {seen.num_read} read")
        for kind, names in changes.items():
            for name in names:
                render.line(f"{kind:<8} {name}")
        if old is not None:
            render.line(
                "the same as at the first start" if same else "the data has CHANGED since the first start"
            )
    return ExitCode.OK if same else ExitCode.DATASET_DRIFT


def _checkpoints_of_run(run: RunPaths, *, partial: bool = False) -> dict[Path, int]:
    # Torn ones in staging are no loss; one with a final name that lost its manifest, or is another run's, is.
    infos = [info for info in list_checkpoints(run) if info.has_own_name]
    if not infos:
        raise no_checkpoint(run.root)
    if partial:
        infos += [info for info in list_checkpoints(run.partial, partial=True) if info.has_own_name]
    return {info.path: info.num_bytes for info in infos}


def _checkpoints_of(place: Path) -> dict[Path, int]:
    if (place / "run.yaml").is_file():
        return _checkpoints_of_run(RunPaths(place))
    remedy = "`verl-slurm list DIR` shows the runs below DIR"
    if not place.is_dir():
        raise NotFound("no such run or checkpoint", where=place, remedy=remedy)
    # A torn checkpoint has the name of one and no manifest: that is for `verify` to say.
    has_name = CHECKPOINT_NAME.match(place.resolve().name.lstrip("."))
    if not has_name and not (place / "manifest.json").is_file():
        expected = "run.yaml or manifest.json in it"
        raise NotFound("neither a run nor a checkpoint", where=place, expected=expected, remedy=remedy)
    return {place: 0}


class Named(NamedTuple):
    """The checkpoint that a word names."""

    path: Path
    lost: tuple[str, ...] = ()
    """Of a run, whose newest it is: a newer one was saved, and cannot be used."""


def lost_newer(run: RunPaths) -> tuple[str, ...]:
    """Warns, and returns the lines, where the newest checkpoint of a run is not the last that it saved."""
    lost = ""
    # A colleague (`group`) need not see the journal.
    with suppress(OSError, VerlSlurmError):
        newest = newest_checkpoint(run.root).name
        lost = gone_back(run, read_history(run), newest, load_resolved(run.run_yaml))
    if not lost:
        return ()
    render.warning(lost)
    return (lost,)


def one_checkpoint(place: Path, run: RunPaths | None = None) -> Named:
    """Returns the checkpoint that a word names: a directory, a run (its newest), or with `run` a name in it."""
    # With --run a word is a name and never a path: a directory of that name may lie beside the caller.
    if run is not None:
        if not CHECKPOINT_NAME.fullmatch(str(place)):
            expected, remedy = "one like step_000012", f"`verl-slurm list {shell_word(run.root)}` lists them"
            raise NotFound("not a checkpoint's name", where=place, expected=expected, remedy=remedy)
        return Named(next(iter(_checkpoints_of(run.checkpoints / place))).resolve())

    if (place / "run.yaml").is_file():
        return Named(newest_checkpoint(place), lost_newer(RunPaths(place)))
    return Named(next(iter(_checkpoints_of(place))).resolve())


# The metrics that people look for first; the others follow in their own order.
_FIRST = ("reward", "kl", "policy_loss", "value_loss", "entropy")
_MAX_CURVES = 12
_GUESTS = {"verl": "verl's", "loop": "the user's own (verl_slurm.run)"}


@command("DIFFERENT CONFIG CORRUPT KEY NOT_FOUND")
@click.argument("checkpoint", metavar="CKPT", type=PLACE)
@click.argument("other", metavar="[OTHER]", type=PLACE, required=False)
@option("--run", RUN, "Names of checkpoints are those of this run.")
@flag("--bits", "Of two: are all values the same, bit for bit?")
@flag("--tensors", "List every tensor: type, shape, size, pieces. In --json they always are.")
@key_option("The key to open them with, instead of what their runs say.")
def inspect(
    checkpoint: Path,
    other: Path | None,
    run: RunPaths | None,
    bits: bool,
    tensors: bool,
    key_file: Path | None,
    as_json: bool,
) -> int:
    """What is in CKPT: position, origin, topology, sizes, tensors, KL window, rollout queue, metric history.

    CKPT is a checkpoint directory, a run (its newest one), or a name with --run. The files that are shown are held
    to their digests; the tensors are listed, not read (`verl-slurm verify` reads every byte).

    With OTHER: how the two differ in position, schema, configuration, topology, data, frozen models, shapes. With
    --bits instead: whether all tensors of models and optimizers and the runtime state of every rank are the same, bit
    for bit; both are verified first. Of what a loop that is not ours saved (docs/guests.md) the files are compared.
    Exit code 0 says the same, 19 different.

    \b
    verl-slurm inspect runs/my
    verl-slurm inspect step_000120 step_000240 --run runs/my
    verl-slurm inspect runs/a runs/b --bits
    """
    if tensors if other is not None else bits:
        raise click.UsageError("--bits is of two checkpoints, --tensors of one.")
    if other is None:
        _describe(one_checkpoint(checkpoint, run), key_file, tensors=tensors, as_json=as_json)
        return ExitCode.OK
    a, b = one_checkpoint(checkpoint, run), one_checkpoint(other, run)
    is_same = (_compare if bits else _differ)(a, b, key_file, as_json=as_json)
    return ExitCode.OK if is_same else ExitCode.DIFFERENT


def _describe(named: Named, key_file: Path | None, *, tensors: bool, as_json: bool) -> None:
    with unless_removed(named.path):
        facts = describe(named.path, keys_for(named.path, key_file))
    if as_json:
        render.json_value(facts | {"lost": named.lost})
        return
    # From the manifest and small files, whose digests were checked; tensors are listed by their index and not read.
    render.fields(_overview(facts))
    render.line()
    render.table(
        ["part", "files", "MB"], [[row["part"], row["files"], _mb(row["bytes"])] for row in facts["parts"]]
    )
    # Files of a framework are verified by their bytes and never opened.
    if facts["guest"] is not None and not facts["domains"]:
        render.line("the state is that loop's own: it is verified, not opened here (docs/guests.md)")
        return
    render.line()
    render.table(
        ["tensors of", "type", "tensors", "elements", "MB"],
        [
            [domain["domain"], row["dtype"], row["tensors"], row["elements"], _mb(row["bytes"])]
            for domain in facts["domains"]
            for row in domain["types"]
        ],
    )
    for domain in facts["domains"]:
        # An index too large to list here; that it is there is said.
        if domain["tensors"] is None:
            render.line(f"{domain['domain']}: an index of {_mb(domain['index_bytes'])} MB, not listed")
    if tensors:
        render.line()
        render.table(["tensor", "type", "shape", "bytes", "pieces"], map(_tensor_row, facts["tensors"]))
    render.line()
    render.table(
        ["rank", "phase", "next", "rollouts", "buffers", "KB"], [_rank_row(state) for state in facts["ranks"]]
    )
    # A sort that is stable: metrics without a place in the list keep the run's own order.
    curves = sorted(
        facts["history"], key=lambda c: _FIRST.index(c["metric"]) if c["metric"] in _FIRST else 99
    )
    if curves:
        render.line()
        _curves(curves)


def _tensor_row(row: dict[str, Any]) -> tuple[object, ...]:
    return f"{row['domain']}/{row['name']}", row["dtype"], str(row["shape"]), row["bytes"], row["pieces"]


def _overview(facts: dict[str, Any]) -> list[tuple[str, object]]:
    place = f"step {facts['step']}, safe point {facts['safe_point']}, {facts['phase']}"
    axes = ", ".join(f"{axis} {size}" for axis, size in facts["topology"].items())
    window = facts["kl_window"]
    layout = "the layout of this version" if facts["schema_is_ours"] else "NOT the layout of this version"
    mean = f", mean {sum(window) / len(window):.4g}" if window else ""
    rows: list[tuple[str, object]] = [
        ("checkpoint", facts["name"]),
        ("path", facts["path"]),
        ("run", facts["run"] or "-"),
        ("position", place if facts["index"] is None else f"{place} {facts['index']}"),
        ("saved", f"{facts['created_utc']}, in {facts['save_seconds']} s, by attempt {facts['attempt']}"),
        ("parent", facts["parent"] or "none: the run's first start"),
        ("ranks", f"{facts['world_size']} ({axes})"),
        ("size", f"{facts['num_files']} files, {_mb(facts['num_bytes'])} MB"),
        ("loop", _GUESTS.get(facts["guest"])),
        ("schema", f"{facts['schema_id'][:16]} of {facts['code_version']}, {layout}"),
    ]
    if facts["guest"] is not None:
        return rows
    data = facts["dataset_fingerprint"][:16]
    rows += [
        ("data", f"{data}, {facts['num_data_files']} files in {facts['data_root']}"),
        ("model", facts["model"] or "-"),
        *((f"frozen {role}", digest[:16]) for role, digest in sorted(facts["frozen"].items())),
        ("reward", _reward(facts["reward"])),
        ("prompts", _consumed(facts["rollout_offset"], facts["samples_per_prompt"])),
        ("KL", f"coefficient {_number(facts['kl_coef'])}, window of {len(window)}{mean}"),
    ]
    for role, schedule in sorted(facts["schedulers"].items()):
        # scheduler.json is read as it was saved, by whichever version.
        if isinstance(schedule, dict):
            rows.append((f"rate {role}", f"{_number(schedule.get('lr'))}, {schedule.get('schedule')}"))
    return rows


def _reward(facts: object) -> str:
    if not isinstance(facts, dict):
        return "-"
    words = [str(facts.get("reward"))]
    if facts.get("replacements"):
        words.append(
            f"since step {int(facts.get('since_step') or 0) + 1}, replacement {facts['replacements']}"
        )
    if facts.get("warm_start_steps_left"):
        scale, offset = _number(facts.get("scale")), _number(facts.get("offset"))
        left = facts["warm_start_steps_left"]
        words.append(f"warm start for {left} more steps, now {scale} x score + {offset}")
    return ", ".join(words)


def _consumed(responses: object, per_prompt: object) -> str:
    if not (isinstance(responses, int) and isinstance(per_prompt, int) and per_prompt > 1):
        return f"{responses} consumed"
    # The offset counts responses, of which a prompt has several.
    return f"{responses // per_prompt} consumed, {per_prompt} responses to each"


def _rank_row(state: dict[str, Any]) -> list[object]:
    # A state of another version is counted, and hides neither the other ranks nor the rest.
    if "problem" in state:
        return [state["rank"], "of another version", "-", "-", "-", round(state["bytes"] / 1e3, 1)]
    buffers = ", ".join(state["reward_buffers"]) or "-"
    size = round(state["bytes"] / 1e3, 1)
    return [state["rank"], state["phase"], state["index"], state["rollouts"], buffers, size]


def _curves(curves: list[dict[str, Any]]) -> None:
    def row(curve: dict[str, Any]) -> tuple[str, ...]:
        values = curve["values"]
        numbers = map(_number, (min(values), max(values), curve["last"]))
        return curve["metric"], sparkline(values, len(values)), *numbers

    longest = max(len(curve["values"]) for curve in curves)
    headings = ("metric", f"last {longest} steps", "least", "greatest", "last")
    render.table(headings, map(row, curves[:_MAX_CURVES]))
    if len(curves) > _MAX_CURVES:
        render.line(f"and {len(curves) - _MAX_CURVES} more metrics: --json")


def _differ(a: Named, b: Named, key_file: Path | None, *, as_json: bool) -> bool:
    # A key for each side, since the two may be of two runs.
    with unless_removed(a.path, b.path):
        found = difference(a.path, b.path, keys_for(a.path, key_file), keys_for(b.path, key_file))
    if as_json:
        shown = [asdict(row) for row in found]
        both = {"a": str(a.path), "b": str(b.path), "lost": (*a.lost, *b.lost)}
        render.json_value(both | {"same": not found, "differences": shown})
        return not found
    render.fields([("a", a.path), ("b", b.path)])
    # What does not differ is named as well: silence about a subject could mean that it was not looked at.
    same = [subject for subject in SUBJECTS if not any(row.subject == subject for row in found)]
    for subject in SUBJECTS:
        rows = [[row.key, _side(row.a), _side(row.b)] for row in found if row.subject == subject]
        if rows:
            render.line()
            render.table([subject, "a", "b"], rows)
    render.line()
    if same:
        render.line(f"the same: {', '.join(same)}")
    render.line(f"DIFFERENT in {counted(len(found), 'place')}" if found else "no difference in any of these")
    render.line("values of weights and states are not compared here: --bits does that")
    return not found


def _compare(a: Named, b: Named, key_file: Path | None, *, as_json: bool) -> bool:
    # Both are verified first: damage must not look like a difference.
    with unless_removed(a.path, b.path):
        found = compare(a.path, b.path, keys_for(a.path, key_file), keys_for(b.path, key_file))
    if as_json:
        render.json_value(msgspec.to_builtins(found) | {"same": found.same, "lost": (*a.lost, *b.lost)})
        return found.same
    if found.same:
        what = counted(found.num_files, "file") if found.num_files else counted(found.num_tensors, "tensor")
        render.line(f"the same: {what}, {found.num_bytes / 1e6:.1f} MB, bit for bit")
    else:
        render.line(f"DIFFERENT in {counted(len(found.differing), 'place')}")
    render.fields([("a", found.a), ("b", found.b)])
    for name in found.differing:
        render.line(f"  {name}")
    return found.same


def _side(value: object) -> str:
    return "-" if value is None else str(value)


def _mb(size: int) -> float:
    return round(size / 1e6, 3)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"
