"""`verl-slurm prune` and `scrub`: which checkpoints are removed, and which are set aside because they are damaged."""

from dataclasses import asdict, replace
from pathlib import Path

import click

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import load_keys
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.best import Best
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.frozen import frozen_digests
from verl_slurm.checkpoint.store.pruning import carry_out, look
from verl_slurm.checkpoint.store.run_config import keys_at_hand
from verl_slurm.checkpoint.store.scrub import Scrubbed, scrub_frozen, scrub_one
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.cli.options import RUN, Number, Whole, exits, json_option, key_option
from verl_slurm.cli.show import render
from verl_slurm.config.load import load_resolved
from verl_slurm.dataset.fingerprint import record as prints
from verl_slurm.verl.inputs import data_of


@click.command(epilog=exits(ExitCode.CORRUPT, ExitCode.KEY, ExitCode.NOT_FOUND))
@click.argument("run", type=RUN)
@click.option(
    "--keep-last",
    type=Whole(min=1),
    help="How many of the newest stay. Default: checkpoint.keep_last of the run.",
)
@click.option(
    "--keep-every",
    type=Whole(min=0),
    help="One in every so many steps stays permanently, 0: none. Default: checkpoint.keep_every of the run.",
)
@click.option(
    "--keep-best",
    type=Whole(min=0),
    help="The best so many by checkpoint.best_metric stay, 0: none. Default: checkpoint.keep_best of the run.",
)
@click.option("--quarantined", is_flag=True, help="Remove what was set aside as damaged, too.")
@click.option("--dry-run", is_flag=True, help="Print the plan, remove nothing.")
@json_option
def prune(
    run: RunPaths,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    quarantined: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove checkpoints of RUN that are no longer needed, and say why each stays or goes.

    A run does this by itself after every save. By hand it frees room: with fewer to keep, or after a
    configuration that kept more. Checkpoints are read back from the newest on until one is good, every byte;
    what is newer than that one, or as new, always stays. Where none is good, nothing goes. --dry-run reads the
    same and prints the very plan that is carried out without it.

    What is torn or not ours is left alone, what is quarantined goes only with --quarantined, and the checkpoint
    that checkpoint.resume_from names stays.

    \b
    verl-slurm prune runs/big --dry-run
    verl-slurm prune runs/big --keep-last 1 --keep-every 1000
    """
    # The run's own retention, of which each option replaces one number.
    config = load_resolved(run.run_yaml).checkpoint
    # A checkpoint that is not signed with them is no reason to remove anything.
    keys = load_keys(config.encryption)
    best = Best.of(config)
    found = look(
        run,
        config.keep_last if keep_last is None else keep_last,
        keep_every=config.keep_every if keep_every is None else keep_every,
        best=best if keep_best is None else replace(best, keep=keep_best),
        # By name: resume_from may be a path, also of this run's own checkpoint.
        protected={Path(config.resume_from or "").name},
        quarantine_too=quarantined,
        verifier=lambda path: verify(path, keys=keys),
    )
    # The very plan that is printed: what was read is not read a second time, nor judged anew.
    removed = [] if dry_run else carry_out(run, found)
    going = [*(item.name for item in found.plan.drop), *found.quarantined]
    # What is gone may be less than what was planned: a run may prune beside us.
    gone = going if dry_run else removed
    freed = sum(found.sizes[name] for name in gone)
    if as_json:
        render.json_value(
            {
                "dry_run": dry_run,
                "verified": found.good,
                "keep": [asdict(item) for item in found.plan.keep],
                "drop": [asdict(item) for item in found.plan.drop],
                "drop_quarantined": list(found.quarantined),
                "removed": removed,
                "num_bytes": freed,
            }
        )
        return
    for line in found.bad:
        render.warning(f"does not verify, and is left as it is: {line}")
    rows = [("keep", item.name, item.reason) for item in found.plan.keep]
    rows += [("drop", item.name, item.reason) for item in found.plan.drop]
    rows += [("drop", name, "set aside, and asked for") for name in found.quarantined]
    render.table(
        ["name", "", "MB", "why"],
        [[name, word, round(found.sizes[name] / 1e6, 1), reason] for word, name, reason in rows],
    )
    count = f"{counted(len(gone), 'checkpoint')}, {freed / 1e6:.1f} MB"
    render.line(f"dry run: would remove {count}" if dry_run else f"removed {count}")


_UNCHECKED = "not checked"


@click.command(epilog=exits(ExitCode.CORRUPT, ExitCode.KEY, ExitCode.DATASET_DRIFT, ExitCode.NOT_FOUND))
@click.argument("run", type=RUN)
@click.option("--dry-run", is_flag=True, help="Read everything, set nothing aside.")
@click.option("--no-data", is_flag=True, help="Leave the data set out.")
@click.option("--rate", type=Number(min=0.1), metavar="MB/S", help="Read no faster than this.")
@key_option("The key that signed them, instead of what the run says.")
@json_option
def scrub(
    run: RunPaths, dry_run: bool, no_data: bool, rate: float | None, key_file: Path | None, as_json: bool
) -> int:
    """Read back all that RUN would need one day: checkpoints, partial ones too, frozen models, and the data set.

    Every byte is read from the medium and held against its digest. A checkpoint that is damaged beyond doubt is
    set aside (checkpoints/quarantine), so that a resume takes the one before it at once; one that cannot be read
    or that others may write is named and left. The data set is read in full, so a change behind an unchanged
    size and mtime is found, too. The copies of models that do not train (RUN/frozen) are treated like checkpoints;
    the next start makes a new one where one was set aside.

    Where the run has a key, each manifest must be signed with it, as a resume asks: one that is not is named and
    left. Where that key cannot be read here, the bytes are checked all the same, and `signature not checked: no
    key` is said.

    The daemon of a running job does the same with one checkpoint after the other (checkpoint.scrub_every_h), and
    brings the second copy of a damaged one home where the nodes have one (checkpoint.local_dir).

    \b
    verl-slurm scrub runs/big --rate 200
    verl-slurm scrub runs/big --dry-run --no-data --json
    """
    # A login node may lack the key. Damage is found without it, and what was not asked is said.
    keys, missing = keys_at_hand(run.root, key_file)
    infos = [i for place in (run, run.partial) for i in list_checkpoints(place) if i.kind == "committed"]
    found: list[tuple[Path, Scrubbed]] = []
    bar, done, total = render.Bar(enabled=not as_json), 0, sum(info.num_bytes for info in infos)
    # Checkpoints first, since a resume needs them first; then models that do not train, then the data.
    for info in infos:
        bar.show("reading back", done, total)
        one = scrub_one(info.path, set_aside=not dry_run, keys=keys, bytes_per_s=rate and rate * 1e6)
        # Pruned by the living run since it was listed, which is no damage.
        if not one.gone:
            found.append((info.path, one))
        done += info.num_bytes
    frozen: list[tuple[Path, Scrubbed]] = []
    for digest in frozen_digests(run):
        bar.show("reading back frozen models", done, total)
        one = scrub_frozen(run, digest, set_aside=not dry_run, bytes_per_s=rate and rate * 1e6)
        if not one.gone:
            frozen.append((run.frozen / digest, one))
    bar.close()
    drifted = [] if no_data else _drift(run)
    everything = [*found, *frozen]
    good = all(one.verdict.ok for _, one in everything)
    # Of all checkpoints together: one that is signed is enough to say that its signature was not asked.
    signature = _signature(keys is not None, missing, any(one.is_signed for _, one in found))
    if as_json:
        render.json_value(
            {
                "ok": good and not drifted,
                "signature": signature,
                "checkpoints": [_shown(path, one) for path, one in found],
                "frozen": [_shown(path, one) for path, one in frozen],
                "data": drifted,
            }
        )
    else:
        if signature.startswith(_UNCHECKED):
            render.warning(f"signature {signature}")
        for path, one in everything:
            name = path.relative_to(run.root)
            render.line(f"{name}  {'ok' if one.verdict.ok else 'BAD'}, {one.verdict.num_bytes / 1e6:.1f} MB")
            for problem in one.verdict.problems:
                render.line(f"  {problem}")
            if one.set_aside is not None:
                render.line(f"  set aside: {one.set_aside.relative_to(run.root)}")
        for line in drifted:
            render.line(f"data: {line}")
    if not good:
        # Damage outweighs a missing signature, and both outweigh data that changed: a resume needs the checkpoint
        # first.
        needs_key = all(one.verdict.ok or one.verdict.needs_key for _, one in everything)
        return ExitCode.KEY if needs_key else ExitCode.CORRUPT
    return ExitCode.DATASET_DRIFT if drifted else ExitCode.OK


def _shown(path: Path, one: Scrubbed) -> dict[str, object]:
    return {
        "path": str(path),
        "ok": one.verdict.ok,
        "problems": [str(problem) for problem in one.verdict.problems],
        "set_aside": one.set_aside and str(one.set_aside),
        "num_bytes": one.verdict.num_bytes,
    }


def _signature(has_keys: bool, missing: str, is_signed: bool) -> str:
    """Returns `checked`, `none` (the run has no keys), or why it was not checked."""
    if has_keys:
        return "checked"
    if missing:
        return f"{_UNCHECKED}: no key ({missing})"
    # Signed, in a run that is configured without a key: nothing here can tell by whom.
    return f"{_UNCHECKED}: no key (the run is configured with none)" if is_signed else "none"


def _drift(run: RunPaths) -> list[str]:
    """Lists how the data set differs from that of the first start, every file read; empty: it does not."""
    old, place = prints.read(run), data_of(load_resolved(run.run_yaml))
    if old is None or place is None:
        return []  # not submitted yet, or a program that was not told which data it has
    # In full: what a scrub looks for, such as a bad disk, changes bytes and leaves size and times.
    now = prints.survey(place, cache=run.hash_cache, full=True).found
    return [f"{kind} {name}" for kind, names in asdict(prints.drift(old, now)).items() for name in names]
