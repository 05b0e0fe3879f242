"""`verl-slurm scrub`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.options import RUN, Number, exits, json_option, key_option
from verl_slurm.cli.show import render

if TYPE_CHECKING:
    from verl_slurm.checkpoint.store.scrub import Scrubbed

__all__ = ["scrub"]

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
    from verl_slurm.checkpoint.store.catalog import list_checkpoints
    from verl_slurm.checkpoint.store.frozen_check import frozen_digests
    from verl_slurm.checkpoint.store.run_keys import keys_at_hand
    from verl_slurm.checkpoint.store.scrub import scrub_frozen, scrub_one

    keys, missing = keys_at_hand(run.root, key_file)
    infos = [i for place in (run, run.partial) for i in list_checkpoints(place) if i.kind == "committed"]
    found: list[tuple[Path, Scrubbed]] = []
    bar, done, total = render.Bar(enabled=not as_json), 0, sum(info.num_bytes for info in infos)
    for info in infos:
        bar.show("reading back", done, total)
        one = scrub_one(info.path, set_aside=not dry_run, keys=keys, bytes_per_s=rate and rate * 1e6)
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
        needs_key = all(one.verdict.ok or one.verdict.needs_key for _, one in everything)
        return ExitCode.KEY if needs_key else ExitCode.CORRUPT
    return ExitCode.DATASET_DRIFT if drifted else ExitCode.OK


def _shown(path: Path, one: "Scrubbed") -> dict[str, object]:
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
    return f"{_UNCHECKED}: no key (the run is configured with none)" if is_signed else "none"


def _drift(run: RunPaths) -> list[str]:
    """Lists how the data set differs from that of the first start, every file read; empty: it does not."""
    from verl_slurm.config.load import load_resolved
    from verl_slurm.dataset.fingerprint import record as prints

    old = prints.read(run)
    if old is None:
        return []  # not submitted yet
    seen = prints.survey(Path(load_resolved(run.run_yaml).data.root), cache=run.hash_cache, full=True)
    drift = prints.drift(old, seen.found)
    kinds = {"added": drift.added, "removed": drift.removed, "changed": drift.changed}
    return [f"{kind} {name}" for kind, names in kinds.items() for name in names]
