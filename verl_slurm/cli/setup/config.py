"""`verl-slurm config` and `init`: every key with its meaning, and a first configuration to start from."""

from pathlib import Path

import click
import msgspec

from verl_slurm.base.errors import PermissionRefused
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.cli.options import PLACE, exits, json_option
from verl_slurm.cli.show import render

__all__ = ["config", "init"]


@click.command(epilog=exits(ExitCode.CONFIG))
@click.argument("names", metavar="[KEY|SECTION]...", nargs=-1)
@click.option("--explain", "explained", metavar="KEY", multiple=True, help="The same as naming it.")
@json_option
def config(names: tuple[str, ...], explained: tuple[str, ...], as_json: bool) -> int:
    """Every key of a configuration with its type, default and meaning; or of the keys and sections that are named.

    \b
    verl-slurm config                       # all keys, a line each
    verl-slurm config slurm                 # a section, with the meaning of each key
    verl-slurm config --explain train.kl_in
    """
    from verl_slurm.config.explain import all_keys, explain

    wanted = [*names, *explained]
    keys = [key for name in wanted for key in explain(name)] if wanted else all_keys()
    if as_json:
        render.json_value(msgspec.to_builtins(keys))
    elif not wanted:
        render.plain_table(["key", "type", "default"], [[key.key, key.type, key.default] for key in keys])
        render.line(
            "the meaning of one: verl-slurm config --explain KEY; of a section: verl-slurm config SECTION"
        )
    else:
        for number, key in enumerate(keys):
            if number:
                render.line()
            render.line(f"{key.key}: {key.type}, default {key.default or '(empty)'}")
            if key.meaning:
                render.wrapped(key.meaning, indent="    ")
    return ExitCode.OK


@click.command(epilog=exits(ExitCode.CONFIG, ExitCode.PERMISSION))
@click.argument("file", type=PLACE, default=Path("my.yaml"), metavar="[FILE]")
@click.option(
    "--for",
    "kind",
    type=click.Choice(["ppo", "grpo", "loop", "verl"]),
    default="grpo",
    show_default=True,
    help="ppo, grpo: our own trainer. loop: a PyTorch program of yours. verl: the package verl.",
)
def init(file: Path, kind: str) -> int:
    """Write FILE (default my.yaml), a commented configuration for your own model and data.

    Lines marked CHANGE are yours to fill in; `verl-slurm submit FILE --dry-run` says what is missing. An existing file
    is never overwritten.

    \b
    verl-slurm init my.yaml
    verl-slurm init my.yaml --for verl
    """
    from verl_slurm.config.first import first_config

    text = first_config(kind, file.stem)
    try:
        with file.open("x") as out:
            out.write(text)
    except FileExistsError:
        raise PermissionRefused(
            "something is in the way", where=file, remedy="choose another FILE, or move it away"
        ) from None
    except FileNotFoundError:
        raise PermissionRefused("no such directory", where=file.parent, remedy="make it first") from None
    render.fields(
        [
            ("written", file),
            ("fill in", "the lines marked CHANGE (docs/first-run.md)"),
            ("check it", f"verl-slurm submit {file} --dry-run"),
            ("start it", f"verl-slurm submit {file} --wait"),
        ]
    )
    return ExitCode.OK
