"""`verl-slurm verify` and `fingerprint`: reads checkpoints and data back."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from verl_slurm.base.errors import NotFound
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import Keyring
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.checkpoint.inspect.compare import newest_checkpoint
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.frozen import frozen_digests
from verl_slurm.checkpoint.store.run_config import keys_at_hand, keys_for
from verl_slurm.checkpoint.store.scrub import Scrubbed, scrub_frozen, scrub_one
from verl_slurm.cli.options import PLACE, RUN, Number, exits, json_option, key_option
from verl_slurm.cli.show import render
from verl_slurm.config.load import load_resolved
from verl_slurm.dataset.fingerprint import record as prints
from verl_slurm.dataset.fingerprint.cache import default_path
from verl_slurm.verl.inputs import data_of

_UNCHECKED = "not checked"


@click.command(epilog=exits(ExitCode.CORRUPT, ExitCode.KEY, ExitCode.DATASET_DRIFT, ExitCode.NOT_FOUND))
@click.argument("place", type=PLACE)
@click.option("--scrub", is_flag=True, help="All that a run would need one day; set aside what is damaged.")
@click.option("--dry-run", is_flag=True, help="With --scrub: read everything, set nothing aside.")
@click.option("--no-data", is_flag=True, help="With --scrub: leave the data set out.")
@click.option("--rate", type=Number(min=0.1), metavar="MB/S", help="Read no faster than this.")
@key_option("The key that signed them, instead of what the run says.")
@click.option("--without-key", is_flag=True, help="Do not ask who made them: their bytes need no key.")
@json_option
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
    at once, the next start makes a new copy of the model. What cannot be read, what others may write, and what is not
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
    read, drifted = _read_back(
        _checkpoints_of(place) if run is None else _committed(run),
        run,
        bar,
        keys=keys,
        set_aside=scrub and not dry_run,
        bytes_per_s=rate and rate * 1e6,
        with_data=not no_data,
    )
    bar.close()
    everything = [row for rows in read.values() for row in rows]
    # Of all checkpoints together: one that is signed is enough to say that its signature was not asked.
    is_signed = any(one.is_signed for _, one in read["checkpoints"])
    missing = missing or ("the run is configured with none" if is_signed else "")
    signature = "checked" if keys else f"{_UNCHECKED}: no key ({missing})" if missing else "none"
    good = all(one.verdict.ok for _, one in everything)
    if as_json:
        answer: dict[str, Any] = {"ok": good and not drifted, "signature": signature}
        answer |= {kind: [_facts(path, one) for path, one in rows] for kind, rows in read.items()}
        render.json_value(answer | ({} if run is None else {"data": drifted}))
    else:
        if signature.startswith(_UNCHECKED):
            render.warning(f"signature {signature}")
        for path, one in everything:
            _tell(path.name if run is None else str(path.relative_to(run.root)), one)
        for line in drifted:
            render.line(f"data: {line}")
    if good:
        return ExitCode.DATASET_DRIFT if drifted else ExitCode.OK
    # Damage outweighs a missing signature: a key that is found later repairs no byte. Both outweigh data that changed:
    # a resume needs the checkpoint first.
    needs_key = all(one.verdict.ok or one.verdict.needs_key for _, one in everything)
    return ExitCode.KEY if needs_key else ExitCode.CORRUPT


_Read = dict[str, list[tuple[Path, Scrubbed]]]


def _read_back(
    sizes: dict[Path, int],
    run: RunPaths | None,
    bar: render.Bar,
    *,
    keys: Keyring | None,
    set_aside: bool,
    bytes_per_s: float | None,
    with_data: bool,
) -> tuple[_Read, list[str]]:
    """Reads the checkpoints; of a `run` its frozen models and its data, too.

    Args:
        sizes: bytes of each checkpoint.
    """
    read: _Read = {"checkpoints": []}
    done, drifted = 0, []
    # All of them, whatever the first ones say: the answer is a list of what is wrong.
    for path, num_bytes in sizes.items():
        bar.show("reading back", done, sum(sizes.values()))
        scrubbed = scrub_one(path, set_aside=set_aside, keys=keys, bytes_per_s=bytes_per_s)
        read["checkpoints"].append((path, scrubbed))
        done += num_bytes
    if run is not None:
        # After the checkpoints, which a resume needs first.
        bar.show("reading back frozen models")
        read["frozen"] = [
            (run.frozen / name, scrub_frozen(run, name, set_aside=set_aside, bytes_per_s=bytes_per_s))
            for name in frozen_digests(run)
        ]
        drifted = _drift(run) if with_data else []
    # What is gone was pruned by the living run since it was listed, which is no damage.
    return {kind: [row for row in rows if not row[1].gone] for kind, rows in read.items()}, drifted


def _committed(run: RunPaths) -> dict[Path, int]:
    infos = [info for place in (run, run.partial) for info in list_checkpoints(place)]
    return {info.path: info.num_bytes for info in infos if info.kind == "committed"}


def _facts(path: Path, one: Scrubbed) -> dict[str, object]:
    return {
        "name": one.verdict.name,
        "path": str(path),
        "ok": one.verdict.ok,
        "problems": one.verdict.problems,
        "set_aside": one.set_aside and str(one.set_aside),
        "num_bytes": one.verdict.num_bytes,
        "seconds": round(one.verdict.seconds, 4),
    }


def _tell(name: str, one: Scrubbed) -> None:
    if one.verdict.ok:
        size = one.verdict.num_bytes / 1e6
        render.line(f"{name}  verified, {size:.1f} MB in {one.verdict.seconds:.2f} s")
    for problem in one.verdict.problems:
        render.line(f"{name}  BAD {problem.path}: {problem.what}")
    if one.set_aside is not None:
        render.line(f"{name}  set aside: {'/'.join(one.set_aside.parts[-3:])}")


def _drift(run: RunPaths) -> list[str]:
    """Lists how the data set differs from that of the first start, every file read; empty: it does not."""
    old = prints.read(run)
    if old is None:
        return []  # not submitted yet
    # In full: what a scrub looks for, such as a bad disk, changes bytes and leaves size and times.
    seen = prints.survey(Path(load_resolved(run.run_yaml).data.root), cache=run.hash_cache, full=True)
    drift = asdict(prints.drift(old, seen.found))
    return [f"{kind} {name}" for kind, names in drift.items() for name in names]


@click.command(epilog=exits(ExitCode.DATA, ExitCode.DATASET_DRIFT, ExitCode.NOT_FOUND))
@click.argument("place", type=PLACE)
@click.option("--against", type=RUN, help="Compare with the data that this run started with.")
@click.option("--full", is_flag=True, help="Read every file, whatever is remembered of it.")
@json_option
def fingerprint(place: Path, against: RunPaths | None, full: bool, as_json: bool) -> int:
    """The SHA-256 tree hash of a data set; of a run, whether its data has changed since its first start.

    PLACE is a data directory, or a run: then its data root is hashed and compared. On drift every added,
    removed and changed file is listed, and the exit code is 16.

    A file with the same path, device, inode, size, mtime and ctime as at the last look is not read again
    (remembered in RUN/.dataset_hashes, or below ~/.cache/verl-slurm for a directory), unless it was younger than
    a minute then, or lies on a file system whose ctime proves nothing (FUSE, SMB, images). To set an old mtime
    after a change does not hide it, as that moves ctime. What can hide it: a clock set back, bytes changed
    below the file system (bad disk, restored image), a write through a mapping on tmpfs, and on NFS, for a
    minute, another node's write. --full reads every byte all the same, and names the files whose content
    changed behind an unchanged stamp.
    """
    # A directory by itself has its cache in the user's own; a run keeps it beside its fingerprint.
    root: Path | tuple[str, ...] = place
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


def _checkpoints_of(place: Path) -> dict[Path, int]:
    """Returns the checkpoints that a word names, and their bytes."""
    if (place / "run.yaml").is_file():
        # Torn ones in staging are no loss; one with a final name that lost its manifest is.
        infos = [i for i in list_checkpoints(RunPaths(place)) if i.kind in ("committed", "torn")]
        found = {info.path: info.num_bytes for info in infos if not info.name.startswith(".")}
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
    return {place: 0}


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
                remedy=f"`verl-slurm list {shell_word(run.root)}` lists them",
            )
        return next(iter(_checkpoints_of(run.checkpoints / place))).resolve()

    is_run = (place / "run.yaml").is_file()
    return newest_checkpoint(place) if is_run else next(iter(_checkpoints_of(place))).resolve()
