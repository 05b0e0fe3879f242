"""`verl-slurm export`."""

from dataclasses import asdict
from pathlib import Path

import click

from verl_slurm.base.errors import DataError, NotFound
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.components import require_own
from verl_slurm.checkpoint.format.specification import REQUIRED_DIRECTORIES
from verl_slurm.checkpoint.format.tensor_index import INDEX
from verl_slurm.checkpoint.inspect.contents import Look
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.cli.checkpoint.verify_command import one_checkpoint
from verl_slurm.cli.command_options import PLACE, RUN, command, key_option, option
from verl_slurm.cli.show import render
from verl_slurm.config.roles import Role
from verl_slurm.config.schema import DataConfig, ModelConfig, RunConfig
from verl_slurm.export.exporting import ExportProgress, Layout, Wish, export as export_checkpoint
from verl_slurm.submit.checks.model_and_reward import build_builtins, check_names


@command("DATA SCHEMA CORRUPT KEY NOT_FOUND PERMISSION")
@click.argument("checkpoint", metavar="CKPT", type=PLACE)
@option("--to", click.Choice(["hf", "single-file", "split"]), "The layout.", required=True)
@option("--out", PLACE, "A new (or empty) directory; it appears as a whole.", required=True)
@option("--run", RUN, "CKPT is the name of a checkpoint of this run.")
@option("--role", click.Choice(["actor", "critic"]), "Which model. Default: the actor (hf), or both.")
@option(
    "--dtype",
    click.Choice(["keep", "float32", "bfloat16"]),
    "Of the models' weights; the optimizer's moments stay as they are.",
    default="keep",
)
@option("--model", PLACE, "The base model, if it no longer lies where the run found it.")
@key_option("The key to open it with, instead of what its run says.")
def export(
    checkpoint: Path,
    to: Layout,
    out: Path,
    run: RunPaths | None,
    role: Role | None,
    dtype: str,
    model: Path | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Write CKPT so that others can read it. CKPT is a checkpoint directory, or a run (its newest one).

    \b
    hf           config.json, tokenizer, sharded safetensors: loads in
                 AutoModelForCausalLM.from_pretrained and in vLLM
    single-file  actor_model.pt critic_model.pt optimizer.pt scheduler.pt
    split        policy_model/pytorch_model.bin value_model/pytorch_model.bin
                 optimizer/optim_states.pt scheduler/sched_state.pt

    The checkpoint is verified first, every byte. Config and tokenizer come from the model the run was started
    from, the chat template from the checkpoint. The .pt files hold plain tensors by name and load with
    weights_only=True; the optimizer's loads with torch.optim.AdamW(model.parameters()).load_state_dict(file["actor"]).

    A part that the checkpoint does not hold (components, include_optimizer) is left out of the .pt layouts.
    Memory: hf needs one shard (5 GB) at a time, the .pt layouts one file (the largest: the optimizer's).
    """
    directory, lost = one_checkpoint(checkpoint, run)
    look = Look(directory, keys_for(directory, key_file))
    # A guest's files are its own: there are no tensors in them that we know by name.
    require_own(look.manifest, directory)
    config = look.config()
    # By the manifest: a checkpoint may have been saved without one of its parts.
    there = {name for name in REQUIRED_DIRECTORIES if f"{name}/{INDEX}" in look.entries}
    # What the child with torch is told: everything is known and checked before it starts.
    wish = Wish(
        to=to,
        out=out,
        roles=_roles(to, role, there, directory),
        dtype=dtype,  # type: ignore[arg-type]  # click has held it to the choices
        model=model.resolve() if model else _base_model(directory, config.get("model.path")),
        # A model named by hand is not held to the digest that the run recorded of its own.
        is_first_model=model is None,
        weight_decay=_number(config.get("train.weight_decay")),
    )
    bar = render.Bar(enabled=not as_json, tells=True)
    if not as_json:
        # On standard error, and before the verification: that alone may take a minute without another word.
        render.warning(f"exporting {directory.name}, {look.manifest.num_bytes / 1e6:.1f} MB, to {out}")
    try:
        done = export_checkpoint(directory, wish, lambda progress: _show(bar, progress), key_file=key_file)
    finally:
        bar.close()
    if as_json:
        render.json_value(asdict(done) | {"lost": lost})
        return
    render.fields(
        [
            ("exported", f"{done.checkpoint}, {' and '.join(done.roles)}, as {done.to}"),
            ("to", done.out),
            (
                "size",
                f"{counted(done.num_files, 'file')}, {done.num_bytes / 1e6:.1f} MB, in {done.seconds:.1f} s",
            ),
            ("memory", f"{done.peak_bytes / 1e6:.1f} MB of tensors at once"),
            ("weights", _weights(config.get("model.dtype"), dtype)),
            ("prompts", done.prompts),
            *([("model", f"{wish.model}: {done.model}")] if done.model else []),
        ]
    )


def _roles(to: Layout, asked: Role | None, there: set[str], where: Path) -> tuple[Role, ...]:
    both: tuple[Role, ...] = ("actor", "critic")
    # A Hugging Face directory holds one model, so there it is the actor unless another one is asked for.
    wanted = (asked,) if asked else both[:1] if to == "hf" else tuple(role for role in both if role in there)
    if not wanted or not there.issuperset(wanted):
        raise NotFound(
            "the checkpoint does not hold the model to export",
            where=where,
            found=", ".join(sorted(there)) or "no tensors",
            expected=" and ".join(wanted or both),
            remedy="export another checkpoint, or what this one holds with --role",
        )
    return wanted


def _weights(trained: object, wanted: str) -> str:
    same = wanted in ("keep", trained)
    return f"{trained}, as in training" if same else f"{wanted}; {trained} in training"


def _show(bar: render.Bar, progress: ExportProgress) -> None:
    words = {
        "verify": "verifying every byte",
        "model": "looking at the base model",
        "load": "starting the writer, which imports torch",
        "write": "writing" + (f" ({progress.peak / 1e9:.1f} GB in memory)" if progress.peak else ""),
        "sync": "making it durable",
    }
    # The verification tells its beginning alone; with a total the bar would stand at zero as if nothing went on.
    bar.show(words[progress.phase], progress.done, 0 if progress.phase == "verify" else progress.total)


def _base_model(directory: Path, path: object) -> Path:
    """Returns the directory of config and tokenizer that config.yaml names."""
    # config.yaml is as it was saved, by whichever version: its values have no types here.
    if not isinstance(path, str) or not path:
        raise DataError(
            "the checkpoint names no base model",
            where=directory / "config.yaml",
            expected="model.path",
            remedy="name its directory with --model DIR",
        )
    # The model alone is needed: with a plain data root, no data is built.
    config = RunConfig(model=ModelConfig(path=path), data=DataConfig(root="."))
    check_names(config)
    # A missing built-in model is built.
    found = Path(build_builtins(config).model.path)
    if not found.is_dir():
        raise DataError(
            "the base model is not where the run found it",
            where=found,
            remedy="say where its config and tokenizer are now: --model DIR",
        )
    return found


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
