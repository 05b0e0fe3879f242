"""Reads the words for verl behind `--` of a command line: Hydra's grammar, by Hydra itself where it is installed."""

import re
import typing

from verl_slurm.config import strict_yaml
from verl_slurm.config.strict_yaml import Value

_VERL_WORD = re.compile(r"(\+{0,2}[A-Za-z_][A-Za-z0-9_@/.-]*)=(.*)", re.DOTALL)


def settings_of(words: typing.Sequence[str]) -> dict[str, Value]:
    """Returns the settings of the words, the last of each key.

    A word that is no setting becomes a key with a blank at its end, which no key of verl's has: it is refused together
    with all others that verl does not take (`verl/overrides.py`).
    """
    return dict(_verl_word(word) for word in _with_values(words))


def _verl_word(word: str) -> tuple[str, Value]:
    """Parses with Hydra's own parser; without Hydra, as outside a container, with ours."""
    # Refused with all others that verl does not take (`verl/overrides.py`): no key has a blank.
    no_word = f"{word} ", None
    if (match := _VERL_WORD.fullmatch(word)) is None:
        return no_word
    try:
        # Hydra's own reading where it is there: it decides in the job what the word means.
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException
    except ModuleNotFoundError:
        return match[1], strict_yaml.parse_value(match[2], word)
    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException:
        return no_word
    if parsed.is_sweep_override():
        return no_word  # a sweep: one run per setting
    return match[1], typing.cast("Value", parsed.value())


def _with_values(words: typing.Sequence[str]) -> typing.Iterator[str]:
    """Yields words; an option of Hydra's and its value are one."""
    former = ""
    for word in words:
        if former:
            yield f"{former}={word}"
            former = ""
        elif word in ("--config-name", "--config-path", "--config-dir", "-cn", "-cp", "-cd"):
            former = word
        else:
            yield word
    if former:
        yield former
