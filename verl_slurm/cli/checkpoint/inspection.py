"""`verl-slurm inspect`: what is in a checkpoint, and how two differ."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.checkpoint.inspect.describe import describe
from verl_slurm.checkpoint.inspect.difference import SUBJECTS, difference
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.cli.checkpoint.verify import one_checkpoint
from verl_slurm.cli.options import PLACE, RUN, exits, json_option, key_option
from verl_slurm.cli.show import render
from verl_slurm.cli.show.pace import sparkline

# The metrics that people look for first; the others follow in their own order.
_FIRST = ("reward", "kl", "policy_loss", "value_loss", "entropy")
_MAX_CURVES = 12
_GUESTS = {"verl": "verl's", "loop": "the user's own (verl_slurm.run)"}


@click.command(
    epilog=exits(ExitCode.DIFFERENT, ExitCode.CONFIG, ExitCode.CORRUPT, ExitCode.KEY, ExitCode.NOT_FOUND)
)
@click.argument("checkpoint", metavar="CKPT", type=PLACE)
@click.argument("other", metavar="[OTHER]", type=PLACE, required=False)
@click.option("--run", type=RUN, help="Names of checkpoints are those of this run.")
@click.option("--bits", is_flag=True, help="Of two: are all values the same, bit for bit?")
@click.option(
    "--tensors", is_flag=True, help="List every tensor: type, shape, size, pieces. In --json they always are."
)
@key_option("The key to open them with, instead of what their runs say.")
@json_option
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
    if other is None:
        if bits:
            raise click.UsageError("--bits compares two checkpoints: give OTHER, too.")
        _describe(one_checkpoint(checkpoint, run), key_file, tensors=tensors, as_json=as_json)
        return ExitCode.OK
    a, b = one_checkpoint(checkpoint, run), one_checkpoint(other, run)
    is_same = (_compare if bits else _differ)(a, b, key_file, as_json=as_json)
    return ExitCode.OK if is_same else ExitCode.DIFFERENT


def _describe(directory: Path, key_file: Path | None, *, tensors: bool, as_json: bool) -> None:
    facts = describe(directory, keys_for(directory, key_file))
    if as_json:
        render.json_value(facts)
        return
    # From the manifest and small files, whose digests were checked; tensors are listed by their index and not read.
    render.fields(_overview(facts))
    render.line()
    render.table(
        ["part", "files", "MB"],
        [[row["part"], row["files"], _mb(row["bytes"])] for row in facts["parts"]],
    )
    # Nothing below exists for a guest: its files are verified by their bytes and never opened.
    if facts["guest"] is not None:
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
        render.table(
            ["tensor", "type", "shape", "bytes", "pieces"],
            [
                [
                    f"{row['domain']}/{row['name']}",
                    row["dtype"],
                    str(row["shape"]),
                    row["bytes"],
                    row["pieces"],
                ]
                for row in facts["tensors"]
            ],
        )
    render.line()
    render.table(
        ["rank", "phase", "next", "rollouts", "buffers", "KB"],
        [_rank_row(state) for state in facts["ranks"]],
    )
    # A sort that is stable: metrics without a place in the list keep the run's own order.
    curves = sorted(
        facts["history"], key=lambda c: _FIRST.index(c["metric"]) if c["metric"] in _FIRST else 99
    )
    if curves:
        render.line()
        _curves(curves)


def _overview(facts: dict[str, Any]) -> list[tuple[str, object]]:
    place = f"step {facts['step']}, safe point {facts['safe_point']}, {facts['phase']}"
    axes = ", ".join(f"{axis} {size}" for axis, size in facts["topology"].items())
    window = facts["kl_window"]
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
        *((("loop", _GUESTS[facts["guest"]]),) if facts["guest"] else ()),
        ("schema", f"{facts['schema_id'][:16]} of {facts['code_version']}, {_ours(facts['schema_is_ours'])}"),
    ]
    if facts["guest"] is not None:
        return rows
    rows += [
        (
            "data",
            f"{facts['dataset_fingerprint'][:16]}, {facts['num_data_files']} files in {facts['data_root']}",
        ),
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
    """Explains the offset: it counts responses, and a prompt has `rollout.samples_per_prompt` of them."""
    if not (isinstance(responses, int) and isinstance(per_prompt, int) and per_prompt > 1):
        return f"{responses} consumed"
    return f"{responses // per_prompt} consumed, {per_prompt} responses to each"


def _rank_row(state: dict[str, Any]) -> list[object]:
    # A state of another version is counted, and hides neither the other ranks nor the rest.
    if "problem" in state:
        return [state["rank"], "of another version", "-", "-", "-", round(state["bytes"] / 1e3, 1)]
    buffers = ", ".join(state["reward_buffers"]) or "-"
    size = round(state["bytes"] / 1e3, 1)
    return [state["rank"], state["phase"], state["index"], state["rollouts"], buffers, size]


def _curves(curves: list[dict[str, Any]]) -> None:
    render.table(
        ["metric", f"last {max(len(c['values']) for c in curves)} steps", "least", "greatest", "last"],
        [
            [
                c["metric"],
                sparkline(c["values"], len(c["values"])),
                *map(_number, (min(c["values"]), max(c["values"]), c["last"])),
            ]
            for c in curves[:_MAX_CURVES]
        ],
    )
    if len(curves) > _MAX_CURVES:
        render.line(f"and {len(curves) - _MAX_CURVES} more metrics: --json")


def _differ(a: Path, b: Path, key_file: Path | None, *, as_json: bool) -> bool:
    """Shows how two checkpoints differ, but for the values of weights and states."""
    # A key for each side, since the two may be of two runs.
    found = difference(a, b, keys_for(a, key_file), keys_for(b, key_file))
    if as_json:
        shown = [asdict(row) for row in found]
        render.json_value({"a": str(a), "b": str(b), "same": not found, "differences": shown})
        return not found
    render.fields([("a", a), ("b", b)])
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


def _compare(a: Path, b: Path, key_file: Path | None, *, as_json: bool) -> bool:
    """Says whether two checkpoints have the same values, bit for bit."""
    try:
        # Both are verified first: damage must not look like a difference.
        found = compare(a, b, key_file)
    except (CheckpointCorrupt, KeyRefused) as error:
        # What the comparing process said is a whole sentence already, with its remedy.
        raise type(error)(str(error.found or error.what)) from None
    if as_json:
        render.json_value(msgspec.to_builtins(found) | {"same": found.same})
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


def _ours(same: bool) -> str:
    return "the layout of this version" if same else "NOT the layout of this version"


def _mb(size: int) -> float:
    return round(size / 1e6, 3)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"
