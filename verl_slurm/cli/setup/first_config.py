"""Writes the text of a first configuration, commented, from what is known of a run. Pure.

A value that is not known becomes a line marked CHANGE. With all of them known the text passes `submit --dry-run`.
"""

import re
from typing import Literal

import msgspec

__all__ = [
    "CHANGE",
    "MAX_NEW_TOKENS",
    "MOST_NODES",
    "MOST_RANKS",
    "Answers",
    "Kind",
    "Place",
    "first_config",
    "first_reward",
    "name_of",
]

Kind = Literal["ppo", "grpo", "loop", "verl"]
CHANGE = "CHANGE"
"""Marks a line that is the user's to fill in."""
MAX_NEW_TOKENS = 256
MOST_NODES, MOST_RANKS = 10_000, 1024
"""The latter on one node."""
_COMMENT_AT = 32
_BATCH = 64
"""Prompts of a step of verl's, about."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run is to train, by what Slurm or the machine says."""

    partition: str | None = None
    """None: the default one, or no Slurm."""
    nodes: int = 1
    ranks_per_node: int = 2
    gpus_per_node: int = 0
    cpus_per_node: int = 8
    time_limit_min: int = 240
    signal_lead_s: int = 120
    notes: tuple[str, ...] = ()
    """What is known of the partition: each becomes a comment."""


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run before its first configuration is written; empty: not known."""

    kind: Kind = "grpo"
    model: str = ""
    reward: str = ""
    data_root: str = ""
    """A directory; `data_files` names files below it, or is empty."""
    data_files: str = ""
    prompt_key: str = "prompt"
    answer_key: str | None = "answer"
    max_prompt_tokens: int = 512
    max_tokens: int | None = None
    """Of the longest sequence that the model was made for."""
    train_files: str = ""
    val_files: str = ""
    """The last two are verl's."""
    program: tuple[str, ...] = ()
    place: Place | None = None


def name_of(stem: str) -> str:
    """Returns a run's name from that of a file, which may hold what a run's may not."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")[:64] or "my-run"


def first_reward(name: str) -> str:
    """Returns the source of a first reward function."""
    return f'''\
"""The reward of {name}: one float for each response. Written by `verl-slurm init`; docs/rewards.md says more."""


def score(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    # A beginning: 1 for a response that contains the answer. A policy soon learns to write many numbers.
    return [float(answer in response) for response, answer in zip(responses, answers, strict=True)]
'''


def first_config(answers: Answers, name: str) -> str:
    """Returns the YAML as text.

    Args:
        name: of the run, as `name_of` makes it.
    """
    open_lines = _middle(answers) + _tail(answers)
    mine = (
        "Lines marked CHANGE are yours to fill in.\n"
        if CHANGE in open_lines
        else "It is complete, and yours to change.\n"
    )
    return f"""\
# {name}: written by `verl-slurm init`. {mine}\
# Check it with `verl-slurm submit FILE --dry-run`; a key's meaning: `verl-slurm config explain KEY`.
# A relative path here goes by the directory of this file. docs/first-run.md goes through it step by step.
name: {name}
run_dir: runs/{{name}}          # below where you submit; on a cluster: on a file system that all nodes see
{open_lines}"""


def _middle(answers: Answers) -> str:
    match answers.kind:
        case "loop":
            return _loop(answers)
        case "verl":
            return _verl(answers)
    return _native(answers)


def _native(answers: Answers) -> str:
    root = "a directory of *.jsonl, *.parquet, ... files, one object a row (docs/data.md)"
    scored = "  # What scores a response: a function of (prompts, responses, answers) that returns one float each, or\n"
    if not answers.reward:
        scored = scored.replace("What", f"{CHANGE}: what")
    ppo = answers.kind == "ppo"
    group = "1             # responses to one prompt" if ppo else "8             # GRPO's group: at least 2"
    critic = "  critic_lr: 1.0e-5\n" if ppo else ""
    files = f"  files: {_yaml(answers.data_files)}\n" if answers.data_files else ""
    rest = 0 if answers.max_tokens is None else answers.max_tokens - answers.max_prompt_tokens
    # If prompts leave no room, `submit` tells it.
    new = rest if 0 < rest < MAX_NEW_TOKENS else MAX_NEW_TOKENS
    answer = "null" if answers.answer_key is None else _yaml(answers.answer_key)
    return f"""
model:
{_line("  path", answers.model, "/path/to/model", "a Hugging Face directory (`hf download NAME --local-dir DIR`)")}\
{scored}\
  # classifier:DIR for a sequence classifier with one label (docs/rewards.md).
  reward: {_yaml(answers.reward or "python:reward.py:score")}

data:
{_line("  root", answers.data_root, "data", root)}\
{files}\
{_with_note(f"  prompt_key: {_yaml(answers.prompt_key)}", "the text that the model goes on from")}\
{_with_note(f"  answer_key: {answer}", "handed to the reward; null: there is none")}\
{_with_note(f"  max_prompt_tokens: {answers.max_prompt_tokens}", "a longer prompt is refused, never cut")}\

rollout:
  micro_batch_size_per_device: 16   # responses sampled at once; a run can stop behind each
  samples_per_prompt: {group}
  max_new_tokens: {new}

train:
  algorithm: {answers.kind}
  steps: 100
  batch_size_per_device: 64         # responses a rank samples for one step
  mini_batch_size_per_device: 32    # for one optimizer update
  micro_batch_size_per_device: 8    # in one forward and backward pass: lower it where memory runs out
  actor_lr: 1.0e-6
{critic}  kl_coef: 0.001
"""


def _loop(answers: Answers) -> str:
    what = "your program and its arguments. Started as torchrun would; it calls verl_slurm.run() (docs/guests.md)."
    words = answers.program or ("train.py", "--lr", "1e-4")
    note = what[:1].upper() + what[1:] if answers.program else f"{CHANGE}: {what}"
    return f"""
trainer:
  backend: command
  # {note}
  command: [{", ".join(map(_yaml, words))}]
"""


def _verl(answers: Answers) -> str:
    ranks = _ranks(answers.place or Place())
    # Of the step and of an update: the number of ranks has to divide both.
    batch = max(_BATCH // ranks, 1) * ranks
    held_out = "held out: verl evaluates on it"
    if not answers.val_files:
        held_out = f"{CHANGE}: {held_out}"
    elif answers.val_files == answers.train_files:
        held_out = f"{CHANGE}: the same file, so nothing is held out"
    return f"""
trainer:
  backend: verl
  entry: ppo                    # verl.trainer.main_ppo on Ray; sft: verl's SFT trainer

# verl's own keys, handed on as they are; `verl-slurm submit FILE -- KEY=VALUE` sets more. docs/verl.md.
verl:
  algorithm.adv_estimator: grpo
  data:
{_line("    train_files", answers.train_files, "/path/to/train.parquet", "columns as verl wants them")}\
{_with_note(f"    val_files: {_yaml(answers.val_files or '/path/to/test.parquet')}", held_out)}\
    train_batch_size: {batch}        # prompts of a step
  actor_rollout_ref:
{_line("    model.path", answers.model, "/path/to/model", "a directory, or a name of the Hugging Face hub")}\
    actor.ppo_mini_batch_size: {batch}
    actor.ppo_micro_batch_size_per_gpu: 8     # lower it where memory runs out
    rollout.name: vllm
    rollout.n: 8                # GRPO's group
    rollout.log_prob_micro_batch_size_per_gpu: 8
    ref.log_prob_micro_batch_size_per_gpu: 8
  trainer.total_epochs: 1
"""


def _tail(answers: Answers) -> str:
    place, known = answers.place or Place(), answers.place is not None
    mine = "" if known else f"{CHANGE}: "
    runtime = "" if answers.kind in ("loop", "verl") else "  runtime_every_steps: 20\n"
    partition = _with_note(
        "  # partition: preemptible", f"{mine}`sinfo -s` lists them; without: the default one"
    )
    gpus = _with_note("  # gpus_per_node: 2", f"{mine}with GPUs, the ranks of one node")
    if place.partition:
        partition = f"  partition: {_yaml(place.partition)}\n"
    if place.gpus_per_node:
        gpus = f"  gpus_per_node: {place.gpus_per_node}\n"
    notes = "".join(f"  # {note}\n" for note in place.notes)
    lead = "how long before the time limit Slurm warns: a save must fit into it"
    return f"""
distributed:
  nodes: {place.nodes}
{_with_note(f"  dp_size: {_ranks(place)}", f"{mine}ranks in all, one a GPU")}\
  device: auto                  # cuda where there is a GPU

checkpoint:
  every_steps: 20               # also saved: at every preemption, time limit and end
{runtime}
slurm:
{partition}{notes}\
  time_limit_min: {place.time_limit_min}
  cpus_per_node: {place.cpus_per_node}
{gpus}\
{_with_note(f"  signal_lead_s: {place.signal_lead_s}", lead)}"""


def _ranks(place: Place) -> int:
    return place.nodes * place.ranks_per_node


def _line(key: str, value: str, otherwise: str, note: str) -> str:
    """Returns a line with the value, or with a placeholder and the mark."""
    return _with_note(f"{key}: {_yaml(value or otherwise)}", note if value else f"{CHANGE}: {note}")


def _with_note(text: str, note: str) -> str:
    return f"{text:<{_COMMENT_AT - 2}}  # {note}\n"


_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@+-]*(?:[:][A-Za-z0-9_./@+-]+)*")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n", "~"})


def _yaml(value: str) -> str:
    # Quoted unless it is plainly a text: a quote is never wrong, and a missing one may be.
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return msgspec.json.encode(value).decode()
