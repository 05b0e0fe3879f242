"""`verl-slurm config`: every key with its meaning, and one key with all that the code tells of it."""

import shlex

import click
import msgspec

from verl_slurm.cli.command_options import KEY, command, flag
from verl_slurm.cli.show import render
from verl_slurm.config.explain import Explained, Key, all_keys, explain, explain_fully

# A word before the keys; no key or section has that name (a test holds it).
_EXPLAIN = "explain"


@command("CONFIG")
@click.argument("names", type=KEY, metavar="[explain] [KEY|SECTION]...", nargs=-1)
@flag("--schema", "Print the JSON Schema by which editors complete a configuration.")
def config(names: tuple[str, ...], schema: bool, as_json: bool) -> None:
    """Every key of a configuration with its type, default and meaning; or of the keys and sections that are named.

    `explain KEY` also shows the unit, an example, whether the key may change when a run is submitted again, and the
    keys that it goes with. A bad value ends a command with 10.

    \b
    verl-slurm config                       # all keys, a line each
    verl-slurm config slurm                 # a section, with the meaning of each key
    verl-slurm config explain train.kl_in   # one key, with all that the code says of it
    verl-slurm config --schema > schema.json    # docs/configuration.md says how an editor finds it
    """
    if schema:
        from verl_slurm.config.explain import json_schema

        if names:
            raise click.UsageError("--schema is of all keys: name none.")
        render.json_value(json_schema())
        return
    in_full = names[:1] == (_EXPLAIN,)
    if names == (_EXPLAIN,):
        raise click.UsageError("explain needs a KEY, e.g. verl-slurm config explain train.steps.")
    keys: list[Key] = [] if names else [*all_keys()]
    for name in names[in_full:]:
        keys += explain_fully(name) if in_full else explain(name)
    if as_json:
        render.json_value(msgspec.to_builtins(keys))
        return
    if not names:
        render.table(["key", "type", "default"], [[key.key, key.type, key.default] for key in keys])
        render.line(
            "the meaning of one: verl-slurm config explain KEY; of a section: verl-slurm config SECTION"
        )
        return
    for number, key in enumerate(keys):
        if number:
            render.line()
        unit = f" ({key.unit})" if key.unit else ""
        render.line(f"{key.key}: {key.type}{unit}, default {key.default or '(empty)'}")
        if key.meaning:
            render.wrapped(key.meaning, indent="    ")
        # A section has too many keys for more than their meanings.
        if isinstance(key, Explained) and key.key in names:
            render.line()
            render.fields(_facts(key))


def _facts(key: Explained) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    if key.example:
        # A key of an entry of a list or map has no word for the command line.
        is_word = key.example.startswith(f"{key.key}=")
        rows.append(
            ("example", f"verl-slurm submit FILE {shlex.quote(key.example)}" if is_word else key.example)
        )
    rows.append(("may change", f"{key.may_change} (from one submission of a run to the next)"))
    if key.related:
        rows.append(("see also", ", ".join(key.related)))
    return rows
