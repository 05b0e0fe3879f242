"""`verl-slurm reshard`."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import MANIFEST
from verl_slurm.checkpoint.store.catalog import unless_removed
from verl_slurm.checkpoint.store.commit import StagingDirectory
from verl_slurm.cli.checkpoint.verify_command import Named, one_checkpoint
from verl_slurm.cli.command_options import PLACE, RUN, Whole, command, flag, option
from verl_slurm.cli.show import render
from verl_slurm.containers.runtimes import contained_argv
from verl_slurm.export.whole_output import require_free, whole_output
from verl_slurm.verl.reshard.checkpoint import (
    DivisionSource,
    Made,
    division_of,
    open_source,
    python_for,
    require_room,
    write_checkpoint,
    write_step,
)
from verl_slurm.verl.reshard.dividing import Division, OnBytes, ReshardPlan
from verl_slurm.verl.step_layout import step_of

_MOST = 65_536


@command("CONFIG CORRUPT NOT_FOUND PERMISSION NO_ROOM")
@click.argument("checkpoint", metavar="CKPT", type=PLACE)
@option("--ranks", Whole(1, _MOST), "GPUs that are to go on from it.", required=True)
@option("--out", PLACE, "A new (or empty) directory; it appears as a whole.", required=True)
@option("--run", RUN, "CKPT is the name of a checkpoint of this run.")
@flag("--dry-run", "Verify CKPT and print the plan, write nothing.")
def reshard(
    checkpoint: Path, ranks: int, out: Path, run: RunPaths | None, dry_run: bool, as_json: bool
) -> None:
    """Divide CKPT, which verl's FSDP engine saved, among another number of ranks.

    CKPT is a checkpoint directory, a run (its newest one), or a global_step_N of plain verl. Its models, optimizers,
    schedules and its place in the data are kept; each tensor, put together, has the same bits as before, which is
    checked. Ranks that CKPT does not have get generators of their own. CKPT stays as it is.

    It is torch that divides, in the ranks' Python of the run that CKPT lies in (slurm.python, its image), and in the
    Python of this command for any other CKPT.

    A run does this by itself when it is submitted with another distributed.dp_size. The command is for a look before
    (--dry-run), and for a checkpoint that goes elsewhere: --out then holds one of the same name, verified like any, or
    for plain verl a trainer.default_local_dir with that one step.

    \b
    verl-slurm reshard RUN --ranks 3 --out divided --dry-run
    verl-slurm reshard RUN/checkpoints/step_000120 --ranks 3 --out divided
    verl-slurm submit my.yaml checkpoint.resume_from=divided/step_000120 distributed.dp_size=3
    """
    named = _named(checkpoint, run)
    directory = named.path
    out = out.parent.resolve() / out.name
    # Before every byte is read.
    require_free(out, directory, "a divided checkpoint")
    bar = render.Bar(enabled=not as_json)
    made = None
    with ExitStack() as opened:
        opened.callback(bar.close)
        bar.show(f"verifying {directory.name}, every byte")
        opened.enter_context(unless_removed(directory))
        source = open_source(directory)
        python = python_for(source, contained_argv)
        # Before the process: it is told which directories it writes to, as an image sees no others.
        below = [] if dry_run else [opened.enter_context(whole_output(out, "the divided checkpoint"))]
        division = opened.enter_context(division_of(source, ranks, python, below=below))
        plan = division.plan
        require_room(source, plan, out)
        for staging in below:
            counter = bar.counter("writing and comparing", plan.work_bytes)
            made = _make(source, division, staging, counter)
    _say(source, plan, made, named.lost, as_json=as_json, out=out)


def _named(place: Path, run: RunPaths | None) -> Named:
    if run is not None or step_of(place.name) is None or not place.is_dir():
        return one_checkpoint(place, run)
    step = place.resolve()
    # The step in a checkpoint of a run has a manifest that vouches for it.
    return Named(step.parent if (step.parent / MANIFEST).exists() else step)


def _make(source: DivisionSource, division: Division, staging: Path, counter: OnBytes) -> Made:
    if source.manifest is None:
        return write_step(source, division, staging, counter)
    inner = staging / ".writing"
    inner.mkdir(mode=0o700)
    final, manifest = staging / source.manifest.name, source.manifest
    place = StagingDirectory(directory=inner, final=final, step=manifest.step, safe_point=manifest.safe_point)
    made = write_checkpoint(source, division, place, on_bytes=counter)
    # A hint among many checkpoints; here is one.
    (staging / "latest").unlink(missing_ok=True)
    return made


def _say(
    source: DivisionSource,
    plan: ReshardPlan,
    made: Made | None,
    lost: tuple[str, ...],
    *,
    as_json: bool,
    out: Path | None = None,
) -> None:
    path = None if made is None or out is None else out / made.path.name
    roles = [
        {
            "role": role.role or "model",
            "engine": f"fsdp{role.engine}",
            "tensors": role.num_tensors,
            "divided": role.num_divided,
            "num_bytes": role.num_bytes,
        }
        for role in plan.roles
    ]
    if as_json:
        value: dict[str, Any] = {
            "source": str(source.directory),
            "lost": lost,
            "ranks": {"before": plan.before, "after": plan.after},
            "models": roles,
            "generators": {"kept": plan.kept, "new": plan.new},
            "data_states": plan.num_data,
            "checkpoint": None if path is None else str(path),
            "tensors_sha256": None if made is None else made.tensors,
            "num_bytes": None if made is None else made.num_bytes,
        }
        render.json_value(value)
        return
    rows: list[tuple[str, object]] = [
        ("source", f"{source.directory}, verified"),
        ("ranks", f"{plan.before} -> {plan.after}"),
    ]
    for role in plan.roles:
        sizes = f"{role.num_tensors} tensors, {role.num_divided} of them divided"
        rows.append((role.role or "model", f"FSDP{role.engine}, {sizes}, {role.num_bytes / 1e6:.1f} MB"))
    new = f"; {counted(plan.new, 'rank')} with new ones" if plan.new else ""
    rows.append(("generators", f"{counted(plan.kept, 'rank')} kept{new}"))
    rows.append(("data", "at the same place" + (f", {plan.num_data} states" if plan.num_data else "")))
    if made is not None and path is not None:
        rows += [
            ("compared", f"every tensor has the same bits (sha256 {made.tensors[:16]})"),
            ("checkpoint", f"{path}, {made.num_bytes / 1e6:.1f} MB, verified"),
        ]
    render.fields(rows)
