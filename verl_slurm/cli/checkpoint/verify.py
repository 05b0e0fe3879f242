"""`verl-slurm checkpoints`, `verify`, `compare` and `fingerprint`."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused, NotFound, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.decide.best import Best, Rank, rank_best
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.inspect.compare import compare as compare_checkpoints, newest_checkpoint
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.lost import gone_back
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.checkpoint.store.verify import verify as verify_directory
from verl_slurm.cli.options import PLACE, RUN, exits, json_option, key_option
from verl_slurm.cli.show import render
from verl_slurm.config.load import load_resolved
from verl_slurm.dataset.fingerprint import record as prints
from verl_slurm.dataset.fingerprint.cache import default_path
from verl_slurm.journal.files import read_history
from verl_slurm.verl.inputs import data_of

FIRST_TO_GO = ("files", "ranks", "attempt", "phase", "created", "MB", "detail")
"""Columns that are dropped if the terminal is narrow, in this order."""


@click.command(epilog=exits(ExitCode.NOT_FOUND))
@click.argument("run", type=RUN)
@json_option
def checkpoints(run: RunPaths, as_json: bool) -> None:
    """The checkpoints of RUN, newest first, from their manifests alone (`verify` reads the files).

    \b
    committed     whole by its manifest
    torn          its writer died before the commit; never used, removed at the next start
    quarantined   did not verify, set aside
    foreign       not a checkpoint of ours

    With checkpoint.keep_best set, a column has that metric of the step that a checkpoint ends, and the place of those
    that are kept for it: `0.83 best`, `0.81 best 2`. --json has all of a step's metrics.
    """
    print_checkpoints(run, as_json)


def print_checkpoints(run: RunPaths, as_json: bool) -> None:
    """Prints the table of `checkpoints RUN` and `list RUN`."""
    found = list_checkpoints(run)
    config = None
    # One of another version: what there is can be listed all the same.
    with suppress(VerlSlurmError):
        config = load_resolved(run.run_yaml)
    best = Best(keep=0) if config is None else Best.of(config.checkpoint)
    places = rank_best(found, best)
    if as_json:
        numbers = {name: place.number for name, place in places.items()}
        render.json_value(
            [asdict(info) | {"path": str(info.path), "best": numbers.get(info.name)} for info in found]
        )
        return
    if not found:
        render.line(f"no checkpoints in {run.checkpoints} yet")
        return
    columns = checkpoints_table(found, places, best.metric if best.keep else None)
    render.table(columns, right=("attempt", "ranks", "files", "MB"), first_to_go=FIRST_TO_GO)
    newest = next((info.name for info in found if info.kind == "committed"), "")
    if lost := gone_back(run, read_history(run), newest, config):
        render.warning(lost)


def checkpoints_table(
    found: Sequence[CheckpointInfo], places: Mapping[str, Rank], metric: str | None
) -> dict[str, list[str]]:
    """Returns cells by heading.

    Args:
        places: the ranks of the best checkpoints, by name.
        metric: the metric that ranks them.
    """
    columns: dict[str, list[str]] = {
        "name": [info.name for info in found],
        "kind": [info.kind for info in found],
        "phase": [info.phase or "-" for info in found],
    }
    if metric is not None:
        columns[metric] = [_metric_words(info.metrics.get(metric), places.get(info.name)) for info in found]
    return columns | {
        "attempt": ["-" if info.attempt is None else str(info.attempt) for info in found],
        "ranks": ["-" if info.world_size is None else str(info.world_size) for info in found],
        "files": [str(info.num_files) for info in found],
        "MB": [f"{info.num_bytes / 1e6:.1f}" for info in found],
        "created": [info.created_utc or "-" for info in found],
        "detail": [info.detail for info in found],
    }


def _metric_words(value: float | None, place: Rank | None) -> str:
    if value is None:
        return "-"
    mark = "" if place is None else " best" if place.number == 1 else f" best {place.number}"
    return f"{value:.4g}{mark}"


@click.command(epilog=exits(ExitCode.CORRUPT, ExitCode.KEY, ExitCode.NOT_FOUND))
@click.argument("place", type=PLACE)
@key_option("The key that signed them, instead of what the run says.")
@click.option("--without-key", is_flag=True, help="Do not ask who made them: their bytes need no key.")
@json_option
def verify(place: Path, key_file: Path | None, without_key: bool, as_json: bool) -> int:
    """Read checkpoints back, every byte, and hold them against their manifests.

    PLACE is a run (all its committed checkpoints) or one checkpoint directory. Nothing is changed. Every file
    that is missing, extra, cut, altered or a link is named. Where the run has a key, each manifest must be signed
    with it. Encrypted files are checked as they lie on disk.
    """
    paths = _checkpoints_of(place)
    # Before the first byte is read: a key that is missing would otherwise show after hours.
    keys = None if without_key else keys_for(place, key_file)
    # All of them, whatever the first ones say: the answer is a list of what is wrong.
    verdicts = [verify_directory(path, keys=keys) for path in paths]
    good = all(verdict.ok for verdict in verdicts)
    if as_json:
        shown = [
            {
                "name": verdict.name,
                "ok": verdict.ok,
                "problems": verdict.problems,
                "num_bytes": verdict.num_bytes,
                "seconds": round(verdict.seconds, 4),
            }
            for verdict in verdicts
        ]
        render.json_value({"ok": good, "checkpoints": shown})
    else:
        for verdict in verdicts:
            if verdict.ok:
                size = verdict.num_bytes / 1e6
                render.line(f"{verdict.name}  verified, {size:.1f} MB in {verdict.seconds:.2f} s")
            for problem in verdict.problems:
                render.line(f"{verdict.name}  BAD {problem.path}: {problem.what}")
    if good:
        return ExitCode.OK
    # Damage outweighs a missing signature: a key that is found later repairs no byte.
    return ExitCode.KEY if all(v.ok or v.needs_key for v in verdicts) else ExitCode.CORRUPT


@click.command(epilog=exits(ExitCode.DIFFERENT, ExitCode.CORRUPT, ExitCode.KEY, ExitCode.NOT_FOUND))
@click.argument("a", type=PLACE)
@click.argument("b", type=PLACE)
@click.option("--run", type=RUN, help="Names of checkpoints are those of this run.")
@key_option("The key of both, instead of what their runs say.")
@json_option
def compare(a: Path, b: Path, run: RunPaths | None, key_file: Path | None, as_json: bool) -> int:
    """Are checkpoints A and B the same, bit for bit? Each is a checkpoint, a run (its newest), or a name with --run.

    Compared are all tensors of models and optimizers and the runtime state of every rank; both are verified
    first. Of what a loop that is not ours saved (docs/guests.md) the files are compared. Exit code 0 says the same,
    19 different.
    """
    try:
        # Both are verified first: damage must not look like a difference.
        found = compare_checkpoints(one_checkpoint(a, run), one_checkpoint(b, run), key_file)
    except CheckpointCorrupt as error:
        # What the comparing process said is a whole sentence already, with its remedy.
        raise CheckpointCorrupt(str(error.found or error.what)) from None
    except KeyRefused as error:
        raise KeyRefused(str(error.found or error.what)) from None
    if as_json:
        render.json_value(msgspec.to_builtins(found) | {"same": found.same})
        return ExitCode.OK if found.same else ExitCode.DIFFERENT
    if found.same:
        what = (
            f"{counted(found.num_files, 'file')}"
            if found.num_files
            else f"{counted(found.num_tensors, 'tensor')}"
        )
        render.line(f"the same: {what}, {found.num_bytes / 1e6:.1f} MB, bit for bit")
    else:
        render.line(f"DIFFERENT in {counted(len(found.differing), 'place')}")
    render.fields([("a", found.a), ("b", found.b)])
    for name in found.differing:
        render.line(f"  {name}")
    return ExitCode.OK if found.same else ExitCode.DIFFERENT


@click.command(epilog=exits(ExitCode.DATA, ExitCode.DATASET_DRIFT, ExitCode.NOT_FOUND))
@click.argument("place", type=PLACE)
@click.option("--against", type=RUN, help="Compare with the data that this run started with.")
@click.option("--full", is_flag=True, help="Read every file, whatever is remembered of it.")
@json_option
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
            raise NotFound(
                "the run was not told which data it has",
                where=place / "run.yaml",
                remedy="set data.root, or give the data's directory",
            )
        root, cache = known, RunPaths(place.resolve()).hash_cache
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
        raise NotFound(
            "the run has no fingerprint yet",
            where=against.fingerprint,
            remedy="it gets one when it is submitted",
        )
    changes = {} if old is None else asdict(prints.drift(old, now))
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


def _checkpoints_of(place: Path) -> list[Path]:
    if (place / "run.yaml").is_file():
        # Torn ones in staging are no loss; one with a final name that lost its manifest is.
        infos = [i for i in list_checkpoints(RunPaths(place)) if i.kind in ("committed", "torn")]
        found = [info.path for info in infos if not info.name.startswith(".")]
        if not found:
            raise NotFound(
                "the run has no checkpoint yet", where=place, remedy=f"verl-slurm status {shell_word(place)}"
            )
        return found
    if not place.is_dir():
        raise NotFound(
            "no such run or checkpoint", where=place, remedy="`verl-slurm list DIR` shows the runs below DIR"
        )
    # A torn checkpoint has the name of one and no manifest: that is for `verify` to say.
    if (
        not CHECKPOINT_NAME.match(place.resolve().name.lstrip("."))
        and not (place / "manifest.json").is_file()
    ):
        raise NotFound(
            "neither a run nor a checkpoint",
            where=place,
            expected="run.yaml or manifest.json in it",
            remedy="`verl-slurm list DIR` shows the runs below DIR",
        )
    return [place]


def one_checkpoint(place: Path, run: RunPaths | None = None) -> Path:
    """Returns the checkpoint that a word names: a directory, a run (its newest), or with `run` a name in that run.

    Raises:
        NotFound: there is no such checkpoint.
    """
    # With --run a word is a name and never a path: a directory of that name may lie beside the caller.
    if run is not None:
        if not CHECKPOINT_NAME.fullmatch(str(place)):
            raise NotFound(
                "not a checkpoint's name",
                where=place,
                expected="one like step_000012, with --run",
                remedy=f"`verl-slurm checkpoints {shell_word(run.root)}` lists them",
            )
        return _checkpoints_of(run.checkpoints / place)[0].resolve()

    is_run = (place / "run.yaml").is_file()
    return newest_checkpoint(place) if is_run else _checkpoints_of(place)[0].resolve()
