"""`verl-slurm prune`."""

from dataclasses import asdict, replace
from pathlib import Path

import click

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.options import RUN, Whole, exits, json_option
from verl_slurm.cli.show import render

__all__ = ["prune"]


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
    help="One in every so many steps stays for ever, 0: none. Default: checkpoint.keep_every of the run.",
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
) -> int:
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
    from verl_slurm.base.keys import load_keys
    from verl_slurm.checkpoint.decide.best import Best
    from verl_slurm.checkpoint.store.pruning import carry_out, look
    from verl_slurm.checkpoint.store.verify import verify
    from verl_slurm.config.load import load_resolved

    config = load_resolved(run.run_yaml).checkpoint
    # A checkpoint that is not signed with them is no reason to remove anything.
    keys = load_keys(config.encryption)
    best = Best.of(config)
    found = look(
        run,
        config.keep_last if keep_last is None else keep_last,
        keep_every=config.keep_every if keep_every is None else keep_every,
        best=best if keep_best is None else replace(best, keep=keep_best),
        protected={Path(config.resume_from or "").name},
        quarantine_too=quarantined,
        verifier=lambda path: verify(path, keys=keys),
    )
    removed = [] if dry_run else carry_out(run, found)
    going = [*(item.name for item in found.plan.drop), *found.quarantined]
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
        return ExitCode.OK
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
    return ExitCode.OK
