"""`verl-slurm config` and `init`: every key with its meaning, and a first configuration to start from."""

import re
from pathlib import Path

import click
import msgspec

from verl_slurm.base.errors import PermissionRefused
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.cli.options import KEY, PLACE, exits, json_option
from verl_slurm.cli.show import render

__all__ = ["config", "init"]


@click.command(epilog=exits(ExitCode.CONFIG))
@click.argument("names", type=KEY, metavar="[KEY|SECTION]...", nargs=-1)
@click.option("--explain", "explained", type=KEY, metavar="KEY", multiple=True, help="The same as naming it.")
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
    text = _first_config(kind, file.stem)
    try:
        # O_EXCL decides, and no look before it: a file that appears in between is not overwritten either.
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


_HEAD = """\
# {name}: written by `verl-slurm init`. Lines marked CHANGE are yours to fill in.
# Check it with `verl-slurm submit FILE --dry-run`; every key with its meaning: `verl-slurm config`.
# A relative path here goes by the directory of this file. docs/first-run.md goes through it step by step.
name: {name}
run_dir: runs/{{name}}          # below where you submit; on a cluster: on a file system that all nodes see
"""
_NATIVE = """
model:
  path: /path/to/model          # CHANGE: a Hugging Face directory (`hf download NAME --local-dir DIR`)
  # CHANGE: what scores a response. A function of (prompts, responses, answers) that returns one float each, or
  # classifier:DIR for a sequence classifier with one label.
  reward: python:reward.py:score

data:
  root: data                    # CHANGE: a directory of *.jsonl files, one object a line
  prompt_key: prompt            # the text that the model goes on from
  answer_key: answer            # handed to the reward
  max_prompt_tokens: 512        # a longer prompt is refused, never cut

rollout:
  micro_batch_size_per_device: 16   # responses sampled at once; a run can stop behind each
  samples_per_prompt: {group}
  max_new_tokens: 256

train:
  algorithm: {kind}
  steps: 100
  batch_size_per_device: 64         # responses a rank samples for one step
  mini_batch_size_per_device: 32    # for one optimizer update
  micro_batch_size_per_device: 8    # in one forward and backward pass: lower it where memory runs out
  actor_lr: 1.0e-6
{critic}  kl_coef: 0.001
"""
_LOOP = """
trainer:
  backend: command
  # CHANGE: your program and its arguments. Started as torchrun would; it calls verl_slurm.run() (docs/guests.md).
  command: [train.py, --lr, "1e-4"]
"""
_VERL = """
trainer:
  backend: verl
  entry: ppo                    # verl.trainer.main_ppo on Ray; sft: verl's SFT trainer

# verl's own keys, handed on as they are; `verl-slurm submit FILE -- KEY=VALUE` sets more. docs/verl.md.
verl:
  algorithm.adv_estimator: grpo
  data:
    train_files: /path/to/train.parquet   # CHANGE
    val_files: /path/to/test.parquet      # CHANGE
    train_batch_size: 64
  actor_rollout_ref:
    model.path: /path/to/model            # CHANGE
    rollout.name: vllm
    rollout.n: 8
  trainer.total_epochs: 1
"""
_TAIL = """
distributed:
  nodes: 1
  dp_size: 2                    # CHANGE: ranks in all, one a GPU
  device: auto                  # cuda where there is a GPU

checkpoint:
  every_steps: 20               # also saved: at every preemption, time limit and end
{runtime}
slurm:
  # partition: preemptible      # CHANGE: `sinfo -s` lists them; without: the default one
  time_limit_min: 240
  cpus_per_node: 8
  # gpus_per_node: 2            # CHANGE: with GPUs, the ranks of one node
  signal_lead_s: 120            # how long before the time limit Slurm warns: a save must fit into it
"""


def _first_config(kind: str, name: str) -> str:
    """Returns the YAML as text. Pure.

    Args:
        kind: `ppo`, `grpo`, `loop` or `verl`.
        name: of the run; a character that no name may have becomes a dash.
    """
    # A file's name may hold what a run's may not; the text must load as it is written.
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:64] or "my-run"
    middle = {"loop": _LOOP, "verl": _VERL}.get(kind, _NATIVE)
    runtime = "" if kind in ("loop", "verl") else "  runtime_every_steps: 20\n"
    critic = "  critic_lr: 1.0e-5\n" if kind == "ppo" else ""
    group = (
        "1             # responses to one prompt"
        if kind == "ppo"
        else "8             # GRPO's group: at least 2"
    )
    text = _HEAD.format(name=name)
    text += middle.format(kind=kind, group=group, critic=critic) if middle is _NATIVE else middle
    return text + _TAIL.format(runtime=runtime)
