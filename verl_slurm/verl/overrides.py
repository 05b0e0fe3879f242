"""verl's own settings, as they stand in a config's `verl:` section and behind `--`, as words for verl's command line.

verl reads its settings with Hydra: `trainer.total_epochs=3`, `+new.key=1` for a key that its files do not have, `~key`
to remove one. The section may be nested or dotted, and may carry these prefixes on any key; words behind `--` are
Hydra's already and count more. Each key comes out once, in the order of the section and then of the words, quoted by
Hydra's grammar: nothing that stands in a value can become another override.

What decides where a run saves, resumes and runs is not verl's to say here: such keys are refused with the key that is
meant. So is what verl cannot do in a run that has to survive its interruptions.

Hydra's grammar: https://hydra.cc/docs/advanced/override_grammar/basic/
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from verl_slurm.base.errors import ConfigError

__all__ = ["OwnSettings", "check_overrides", "hydra_words", "override_value"]

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_\-/]*(?:[.@:][A-Za-z0-9_\-/]+)*")
_WORD = re.compile(r"(?P<prefix>\+\+|\+|~)?(?P<key>[^=\s]+?)(?:=(?P<value>.*))?", re.DOTALL)
_DICT_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./\-]*")
_SPECIAL = {"null", "none", "true", "false", "nan", "inf"}
# From where the run of backslashes begins: tried from each of them, a long run takes time by its square.
_BEFORE_QUOTE = re.compile(r"(?<!\\)(\\*)('|\Z)")

_OURS = {
    "trainer.default_local_dir": "run_dir: saves go through RUN/work, and once verified lie in RUN/checkpoints",
    "trainer.default_hdfs_dir": "tiers: they move verified checkpoints",
    "trainer.resume_mode": "checkpoint.resume_from",
    "trainer.resume_from_path": "checkpoint.resume_from",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.max_critic_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.max_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.nnodes": "distributed.nodes",
    "trainer.n_gpus_per_node": "distributed.dp_size (ranks of all nodes) and distributed.nodes",
    "trainer.checkpoint_callback_class": "nothing: verl-slurm commits what verl has saved, and moves it away",
    "ray_kwargs.ray_init": "slurm.cpus_per_node, slurm.gpus_per_node and distributed: Ray is started on the job's nodes"
    " before verl, which joins it",
    "hydra.run": "run_dir: Hydra's own log lies in RUN/work",
    "hydra.output_subdir": "nothing: verl's whole configuration is in RUN/run.yaml and in verl's log",
    "hydra.sweep": "one run for each setting: verl-slurm submit",
    "hydra.mode": "one run for each setting: verl-slurm submit",
}
"""Keys, and all below them, that are said elsewhere; and where."""
_ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
"""Below a key of ours, and verl's own place for the environment of its workers: it may be used."""
_LOOKED_AT = ("trainer.v1.trainer_mode", "trainer.use_v1", "trainer.del_local_ckpt_after_load")
"""Keys of `_refuse_impossible` that no map may hide."""
_MODES = ("sync", "colocate_async")
_WHOLE = {"model", "optimizer", "extra"}


class OwnSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a start of ours says to verl."""

    nodes: int
    ranks_per_node: int
    save_dir: PurePath
    """This incarnation's work directory."""
    resume: PurePath | None
    """The verified checkpoint's `global_step_N`; None: from the start."""
    every_steps: int
    name: str


class _Override(msgspec.Struct, frozen=True):
    prefix: str
    key: str
    value: str | None
    """By Hydra's grammar; None: `~key`."""

    @property
    def word(self) -> str:
        return f"{self.prefix}{self.key}" + ("" if self.value is None else f"={self.value}")


def hydra_words(section: Mapping[str, Any], words: Sequence[str], own: OwnSettings) -> list[str]:
    """The command line of `verl.trainer.main_ppo`: the user's settings, then those of this start.

    Raises:
        ConfigError: as `check_overrides`.
    """
    said = {override.key: override for override in check_overrides(section, words)}
    mode = override_value(section, words, "trainer.v1.trainer_mode") or "sync"
    ours: dict[str, Any] = {
        "trainer.default_local_dir": str(own.save_dir),
        "trainer.resume_mode": "disable" if own.resume is None else "resume_path",
        "trainer.resume_from_path": None if own.resume is None else str(own.resume),
        "trainer.nnodes": own.nodes,
        "trainer.n_gpus_per_node": own.ranks_per_node,
        # verl would remove by its own memory, which a restart forgets; here it removes nothing.
        "trainer.max_actor_ckpt_to_keep": None,
        "trainer.max_critic_ckpt_to_keep": None,
        "trainer.v1.trainer_mode": f"verl_slurm_{mode}",
        "hydra.run.dir": str(own.save_dir.parent / "hydra"),
        "hydra.output_subdir": None,
    }
    unless_said = {"trainer.save_freq": own.every_steps, "trainer.experiment_name": own.name}
    ours |= {key: value for key, value in unless_said.items() if key not in said}
    theirs = [override.word for key, override in said.items() if key not in ours]
    return [*theirs, *(f"{key}={_quoted(value, key)}" for key, value in ours.items())]


def check_overrides(section: Mapping[str, Any], words: Sequence[str] = ()) -> list[_Override]:
    """The user's settings in order, each key once; what comes later counts.

    Raises:
        ConfigError: no override of Hydra's, a key that is not verl's to say, or what verl cannot do.
    """
    found: dict[str, _Override] = {}
    for override in [*_of_section(section), *map(_of_word, words)]:
        found.pop(override.key, None)  # its place is that of the one that counts
        found[override.key] = override
    for override in found.values():
        _refuse_whole(override)
        _refuse_ours(override)
        _refuse_impossible(override)
    return list(found.values())


def override_value(section: Mapping[str, Any], words: Sequence[str], key: str) -> str | None:
    """What the user says for `key`, as Hydra would print it; None: nothing."""
    values = [o.value for o in [*_of_section(section), *map(_of_word, words)] if o.key == key]
    return None if not values or values[-1] is None else values[-1].strip("'\"")


def _of_section(section: Mapping[str, Any], above: str = "", prefix: str = "") -> Iterator[_Override]:
    for name, value in section.items():
        bare = name.lstrip("+~")
        own = name[: len(name) - len(bare)] or prefix
        key = f"{above}.{bare}" if above else bare
        if own not in ("", "+", "++", "~") or not _KEY.fullmatch(key):
            raise _wrong(f"verl.{key}", name, "a key of verl's, e.g. trainer.total_epochs or +new.key")
        if isinstance(value, Mapping) and value:
            yield from _of_section(value, key, own)
        elif own == "~":
            yield _Override("~", key, None)
        else:
            yield _Override(own, key, _quoted(value, key))


def _of_word(word: str) -> _Override:
    match = _WORD.fullmatch(word)
    if match is None or not _KEY.fullmatch(match["key"]) or "\n" in word or "\0" in word:
        raise _wrong("behind --", word, "one of Hydra's overrides, e.g. trainer.total_epochs=3 or +new.key=1")
    if match["value"] is None and match["prefix"] != "~":
        raise _wrong("behind --", word, f"{match['key']}=VALUE")
    return _Override(match["prefix"] or "", match["key"], match["value"])


def _quoted(value: object, key: str) -> str:
    """By Hydra's grammar, so that Hydra reads exactly this value back."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value)
        case str():
            return _text(value, key)
        case Mapping():
            for name in value:
                if not isinstance(name, str) or not _DICT_KEY.fullmatch(name):
                    raise _wrong(f"verl.{key}", name, "a name that Hydra takes as a key")
            return "{" + ",".join(f"{name}:{_quoted(v, key)}" for name, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(_quoted(item, key) for item in value) + "]"
        case _:
            raise _wrong(f"verl.{key}", type(value).__name__, "text, a number, a list or a mapping")


def _text(text: str, key: str) -> str:
    if any(ord(letter) < 32 and letter != "\t" for letter in text):
        raise _wrong(f"verl.{key}", repr(text), "text on one line")
    if _PLAIN.fullmatch(text) and text.lower() not in _SPECIAL:
        return text
    # A backslash is itself, unless it stands before a quote.
    return "'" + _BEFORE_QUOTE.sub(lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"


def _refuse_whole(override: _Override) -> None:
    """A map in braces, or the removal of a whole section, behind which keys of ours would not be seen."""
    key, value = override.key.replace("/", "."), (override.value or "").strip()
    if override.prefix != "~" and (not value.startswith("{") or value == "{}"):
        return
    above = any(known.startswith(f"{key}.") for known in (*_OURS, *_LOOKED_AT))
    if above or (value and (f"{key}.".endswith(".checkpoint.") or "checkpoint" in value)):
        raise _cannot(override, f"{key}.NAME=VALUE, each by itself", "what is in it has to be looked at")


def _refuse_ours(override: _Override) -> None:
    key = override.key.replace("/", ".")
    if key == _ENV_VARS or key.startswith(f"{_ENV_VARS}."):
        return
    for ours, instead in _OURS.items():
        if key == ours or key.startswith(f"{ours}."):
            raise ConfigError(
                "this setting of verl's is not said under verl:",
                where=override.key,
                remedy=f"instead: {instead}",
            )


def _refuse_impossible(override: _Override) -> None:
    """What would run, and lose or break something that a run here is promised."""
    value = (override.value or "").strip("'\" ")
    on = value.lower() in ("true", "1", "yes", "on")
    match override.key:
        case "trainer.v1.trainer_mode" if value not in _MODES:
            raise _cannot(
                override,
                f"one of {', '.join(_MODES)}",
                "the others keep no state that a resume is exact from",
            )
        case "trainer.use_v1" if not on:
            raise _cannot(override, "true", "verl's older trainer cannot be asked to save and leave")
        case "trainer.val_only" if on:
            raise _cannot(
                override, "false", "it trains no step, and a run is done behind its last one: use verl itself"
            )
        case "trainer.save_freq" if not value.isdigit() or int(value) == 0:
            raise _cannot(override, "at least 1", "verl saves its last step only when it saves at all")
        case "trainer.del_local_ckpt_after_load" if on:
            raise _cannot(
                override, "false", "it would remove the verified checkpoint that a start resumed from"
            )
        case key if key.endswith(".checkpoint.async_save") and on:
            raise _cannot(override, "false", "nobody could say when such a save is whole")
        case key if key.endswith((".checkpoint.save_contents", ".checkpoint.load_contents")):
            parts = {part.strip(" '\"") for part in value.strip("[]").split(",")}
            if not value.startswith("${") and not parts >= _WHOLE:
                raise _cannot(override, "[model,optimizer,extra]", "a resume needs all three")


def _cannot(override: _Override, expected: str, why: str) -> ConfigError:
    return ConfigError(
        "verl cannot be run so here", where=override.key, found=override.value, expected=expected, remedy=why
    )


def _wrong(where: str, found: object, expected: str) -> ConfigError:
    return ConfigError("no setting that verl can read", where=where, found=found, expected=expected)
