"""One run for each combination of values: names them, and splits the words. Pure.

`train.actor_lr=1e-6,3e-6 seed=0,1` are four runs below the directory that the configuration names:
`actor_lr1e-6-seed0`, `actor_lr1e-6-seed1`, and so on.
"""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from verl_slurm.base.errors import ConfigError

_MOST = 1000
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "\"'"


class SweptRun(NamedTuple):
    """One combination."""

    label: str
    """The keys' last parts with their values; a directory's name."""
    words: tuple[str, ...]
    """All words, with one value for each key."""


def swept_runs(words: Sequence[str]) -> list[SweptRun]:
    """Returns all combinations, the last key's values changing first.

    Args:
        words: `KEY=VALUE`, or `KEY=VALUE,VALUE,...`. A comma in brackets or quotes separates nothing.

    Raises:
        ConfigError: no word has several values, one is empty, two combinations have the same name, or there are more
            than 1,000.
    """
    for word in words:
        if "=" not in word:
            raise ConfigError("not an override", where=word, expected="KEY=VALUE or KEY=VALUE,VALUE,...")
    keys = [word.partition("=")[0] for word in words]
    choices = [_values(word.partition("=")[2]) for word in words]
    swept = [number for number, values in enumerate(choices) if len(values) > 1]
    _require_good(words, choices, swept)
    short = {keys[number]: keys[number].rpartition(".")[2] for number in swept}
    # `train.lr` and `critic.lr` would both be `lr`.
    if len(set(short.values())) < len(short):
        short = {key: key for key in short}
    found = []
    for chosen in itertools.product(*choices):
        parts = [short[keys[number]] + _NOT_IN_NAMES.sub("_", chosen[number]).strip("_") for number in swept]
        found.append(SweptRun("-".join(parts), tuple(map("=".join, zip(keys, chosen, strict=True)))))
    labels = [run.label for run in found]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(
            "two runs of the sweep would have the same name",
            where="--sweep",
            found=twice,
            remedy="leave out the value that is there twice, or submit one of them by itself",
        )
    return found


def _require_good(words: Sequence[str], choices: Sequence[Sequence[str]], swept: Sequence[int]) -> None:
    if not swept:
        raise ConfigError(
            "nothing to sweep", where="--sweep", expected="KEY=VALUE,VALUE,..., e.g. seed=0,1,2"
        )
    if empty := next((words[number] for number in swept if "" in choices[number]), None):
        raise ConfigError("a value of the sweep is empty", where="--sweep", found=empty)
    count = 1
    for number in swept:
        count *= len(choices[number])
    if count > _MOST:
        raise ConfigError(
            "the sweep has too many runs", where="--sweep", found=f"{count:,}", expected=f"at most {_MOST:,}"
        )


def _values(text: str) -> list[str]:
    """Splits at the commas outside of brackets and quotes."""
    values, depth, quote, start = [], 0, "", 0
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "," and depth <= 0:
            values.append(text[start:at].strip())
            start = at + 1
    return [*values, text[start:].strip() if values else text]
