"""`verl-slurm key new` and `key id`."""

from pathlib import Path

import click

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import new_key_file, read_key_file
from verl_slurm.cli.options import PLACE, exits, json_option
from verl_slurm.cli.show import render


@click.group()
def key() -> None:
    """Keys that checkpoints and rollout journals are encrypted (AES-256-GCM) and signed (HMAC-SHA256) with.

    \b
    verl-slurm key new ~/.verl-slurm/run.key
    verl-slurm submit my.yaml checkpoint.encryption.key_file=$HOME/.verl-slurm/run.key

    Without its key a checkpoint is lost: keep a copy where the checkpoints are not. One key for each run:
    then a checkpoint of one run cannot pass for another's.
    """


@key.command("new", epilog=exits(ExitCode.PERMISSION, ExitCode.KEY))
@click.argument("file", type=PLACE)
@json_option
def new(file: Path, as_json: bool) -> None:
    """Make a key of 32 random bytes in FILE, 0600. A file that is there is never overwritten."""
    _show(file, new_key_file(file).id, as_json)


@key.command("id", epilog=exits(ExitCode.PERMISSION, ExitCode.KEY))
@click.argument("file", type=PLACE)
@json_option
def show_id(file: Path, as_json: bool) -> None:
    """The id of the key in FILE, as manifests name it. It tells nothing about the key."""
    _show(file, read_key_file(file).id, as_json)


def _show(file: Path, key_id: str, as_json: bool) -> None:
    render.answer({"file": str(file), "key_id": key_id}, f"{key_id}  {file}", as_json=as_json)
