"""Writes the text of a first configuration, commented, from what is known of a run. Pure.

A value that is not known becomes a line marked CHANGE. With all of them known the text passes `submit --dry-run`.
"""

import re
from functools import cache
from typing import Literal

import jinja2
import msgspec

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
    keys: str = ""
    """Those of the data, if none of them is known to hold answers."""
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


def first_reward(name: str, *, has_answers: bool = True) -> str:
    """Returns the source of a first reward function."""
    # Every text contains an empty answer: such a reward would be 1 always, and teach nothing.
    guard = "" if has_answers else _GUARD
    return f'''\
"""The reward of {name}: one float for each response. Written by `verl-slurm init`; docs/rewards.md says more."""


def score(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
{guard}\
    # A beginning: 1 for a response that contains the answer. A policy soon learns to write many numbers.
    return [float(answer in response) for response, answer in zip(responses, answers, strict=True)]
'''


_GUARD = f"""\
    # {CHANGE}: the data has no answers (data.answer_key is null), so each of `answers` is empty text.
    if not any(answers):
        raise ValueError("reward.py: say what makes a response good, or set data.answer_key")
"""


def first_config(answers: Answers, name: str) -> str:
    """Returns the YAML as text.

    Args:
        name: of the run, as `name_of` makes it.
    """
    place = answers.place or Place()
    ranks = place.nodes * place.ranks_per_node
    left = 0 if answers.max_tokens is None else answers.max_tokens - answers.max_prompt_tokens
    return _template().render(
        a=answers,
        name=name,
        place=place,
        ranks=ranks,
        # Of verl's step and of an update: the number of ranks has to divide both.
        batch=max(_BATCH // ranks, 1) * ranks,
        # If prompts leave no room, `submit` tells it.
        new_tokens=left if 0 < left < MAX_NEW_TOKENS else MAX_NEW_TOKENS,
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(  # noqa: S701 - YAML, whose values `yaml` quotes
        loader=jinja2.PackageLoader("verl_slurm.cli.setup", "assets"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"yaml": _yaml, "noted": lambda text, note: f"{text:<{_COMMENT_AT - 2}}  # {note}"}
    return environment.get_template("first_config.yaml.jinja")


_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@+-]*(?:[:][A-Za-z0-9_./@+-]+)*")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n", "~"})


def _yaml(value: str) -> str:
    # Quoted unless it is plainly a text: a quote is never wrong, and a missing one may be.
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return msgspec.json.encode(value).decode()
