"""Composes verl's settings by Hydra, over the configuration files of the installed verl.

Hydra is installed wherever verl is. verl itself is not imported, which would load torch and Ray: its directory
`trainer/config` is found by name.

References between settings (`${data.train_files}`) are resolved. References to the environment (`${oc.env:NAME}`) stay
as written: the job's environment is another one, and its values do not belong into messages.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from verl_slurm.base.errors import ConfigError, together
from verl_slurm.base.packages import require_packages
from verl_slurm.verl.overrides import (
    OwnSettings,
    Setting,
    former_name,
    judged,
    own_settings,
    require_possible,
    trainer_mode,
)
from verl_slurm.verl.releases import Entry

if TYPE_CHECKING:
    from omegaconf import DictConfig


_CONFIG = {"ppo": "ppo_trainer", "sft": "sft_trainer_engine"}
_DOTTED = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
_MOST_CHARACTERS = 1 << 20
"""Of all values, and of what each reference gives on the way; verl's own configuration takes 70,000."""
_PER_VALUE = 40


class Composed(msgspec.Struct, frozen=True):
    """verl's input.

    Attributes:
        words: overrides for Hydra, including those of the start.
        config: verl's whole configuration, an omegaconf.DictConfig.
        settings: the same as plain values; one that needs the environment is as it is written.
        unset: keys that verl leaves to the user (`???`) and that have no value.
    """

    words: list[str]
    config: Any
    settings: dict[str, Any]
    unset: tuple[str, ...] = ()

    def as_yaml(self) -> str:
        """Returns the whole configuration, its references as they are written."""
        from omegaconf import OmegaConf

        return str(OmegaConf.to_yaml(self.config))


def checked_settings(
    entry: Entry, section: Mapping[str, Any], own: OwnSettings, *, recipe: bool = False
) -> Composed:
    """Composes the user's settings and those of a start, and refuses impossible ones. Takes a second, mostly for
    imports.

    Args:
        recipe: for a recipe's own main, which may look at the mode, and names a trainer itself or by the mode.

    Raises:
        ConfigError: verl does not take a setting, or a run cannot.
    """
    said, refused = judged(section)
    try:
        # The start's own settings come last: of two words for one key Hydra takes the later one.
        answer = composed(entry, [*said.values(), *own_settings(entry, own, said)])
        # On what comes out, not on the words: a reference or a group may set a key without naming it.
        require_possible(answer.settings, said)
    except ConfigError as error:
        raise together([*refused, error]) from error
    if refused:
        raise together(refused)
    if entry == "ppo" and not recipe:  # our trainers are registered under names like verl's
        answer.words.append(f"trainer.v1.trainer_mode=verl_slurm_{trainer_mode(answer.settings)}")
    return answer


def composed(entry: Entry, settings: Iterable[Setting]) -> Composed:
    """Composes settings into verl's configuration. Errors as `words_of` and `compose`."""
    words = words_of(settings)
    config = compose(entry, words)
    # Not OmegaConf's own list, which follows references, also in a circle.
    unset = tuple(sorted(key for key, node in _leaves(config, "") if node is not None and node._is_missing()))
    return Composed(words, config, _plain(config), unset)


def words_of(settings: Iterable[Setting]) -> list[str]:
    """Returns words for Hydra's command line. Hydra writes them, and reads each back to the same value.

    Raises:
        ConfigError: Hydra's grammar has no such word.
    """
    require_packages("verl", "hydra", wanted_by="a run with trainer.backend: verl")
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override, OverrideType, ValueType
    from hydra.errors import HydraException

    parser, words = OverridesParser.create(), []
    for setting in settings:
        word = setting.name
        if setting.prefix != "~":
            # Each text is quoted: what looks like a list, a number or another override stays text.
            value = _quoted(setting.value)
            # Hydra's own writer, so that quoting and escapes are those of its own parser.
            override = Override(OverrideType.CHANGE, setting.key, ValueType.ELEMENT, _value=value)
            word += f"={override.get_value_element_as_str()}"
        try:
            # Read back, because what is written must not mean another key or value to verl.
            read = parser.parse_override(word)
        except HydraException as error:
            raise _refused(str(error), f"verl.{setting.key}") from None
        key = read.key_or_group + (f"@{read.package}" if read.package else "")
        if key != setting.key or (setting.prefix != "~" and read.value() != setting.value):
            raise ConfigError(
                "no setting that verl can read",
                where=f"verl.{setting.key}",
                found=setting.value,
                expected="what Hydra's grammar can say",
            )
        words.append(word)
    return words


def compose(entry: Entry, words: Iterable[str]) -> "DictConfig":
    """Returns verl's whole configuration. Raises ConfigError if Hydra or verl does not take a word."""
    # Hydra's own settings are for `hydra.main`, not for the configuration.
    chosen = [word for word in words if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]
    problem, config = _by_hydra(entry, chosen)
    if config is None:
        raise together(_refusals(entry, chosen, problem))
    return config


def _by_hydra(entry: Entry, words: Sequence[str]) -> tuple[str, "DictConfig | None"]:
    """Returns what Hydra says against words, or what it makes of them."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        # verl's files as they are installed, so that that release's own defaults count.
        with hydra.initialize_config_dir(str(_files()), version_base=None):
            return "", hydra.compose(_CONFIG[entry], overrides=list(words))
    except (HydraException, OmegaConfBaseException) as error:
        # Hydra's first line names what is wrong. The next one proposes `+KEY`, which nothing of verl's may read.
        return str(error).partition("\n")[0], None


def _files() -> Path:
    spec = find_spec("verl")
    (place, *_) = (spec.submodule_search_locations if spec else None) or [""]
    return Path(place) / "trainer" / "config"


def _refusals(entry: Entry, words: Sequence[str], problem: str) -> list[ConfigError]:
    """Returns an error for each word that Hydra does not take: it names the first of them alone."""
    plain, groups = dict[str, str](), list[str]()
    for word in words:
        key = word.partition("=")[0]
        if _DOTTED.fullmatch(key) and not (_files() / key).is_dir():
            plain[word] = key
        elif not key.startswith(("+", "~")):
            groups.append(word)
    _, config = _by_hydra(entry, groups)
    if config is None:
        return [_refused(problem)]
    added = tuple(word.lstrip("+").partition("=")[0] for word in words if word.startswith("+"))
    unknown = {
        word: key
        for word, key in plain.items()
        if not _has(config, key) and not f"{key}.".startswith(tuple(f"{one}." for one in added))
    }
    found = [_unknown(entry, config, key) for key in dict.fromkeys(unknown.values())]
    rest, _ = _by_hydra(entry, [word for word in words if word not in unknown])
    return [*found, *([_refused(rest)] if rest else [])] or [_refused(problem)]


def unread_additions(entry: Entry, said: Iterable[Setting]) -> tuple[list[ConfigError], list[str]]:
    """Judges `+KEY` words that lie beside verl's own keys: refusals of former names, and notes about the others."""
    added = [one.key for one in said if one.prefix in ("+", "++") and _DOTTED.fullmatch(one.key)]
    if not added:
        return [], []
    _, config = _by_hydra(entry, [])
    if config is None:
        return [], []
    beside = [key for key in added if not _has(config, key) and not _is_open(config, key)]
    # A former name would be taken and ignored.
    refused = [_unknown(entry, config, key) for key in beside if former_name(entry, key)]
    notes = [
        f"not looked at: whether anything reads verl.+{key}, which lies beside keys of verl's and is none of them"
        for key in beside
        if not former_name(entry, key)
    ]
    return refused, notes


def _has(config: Any, key: str) -> bool:
    from omegaconf import DictConfig

    place = config
    for part in key.split("."):
        # A reference to another section: Hydra itself knows what it holds.
        if isinstance(place, DictConfig) and place._is_interpolation():
            return True
        if not isinstance(place, DictConfig) or place._is_none() or part not in place.keys():  # noqa: SIM118
            return False
        place = place._get_node(part)
    return True


def _is_open(config: Any, key: str) -> bool:
    """Returns whether a key that verl's files do not have may be added: below no section of theirs, or an empty one."""
    from omegaconf import DictConfig

    place = config
    for part in key.split(".")[:-1]:
        if not isinstance(place, DictConfig) or place._is_none() or part not in place.keys():  # noqa: SIM118
            return place is config
        place = place._get_node(part)
        if isinstance(place, DictConfig) and not place._is_none() and len(place) == 0:
            return True
    return False


def _unknown(entry: Entry, config: Any, key: str) -> ConfigError:
    where = f"verl.{key}"
    what = "verl has no such setting"
    if former := former_name(entry, key):
        return ConfigError(what, where=where, found="a name of another release or trainer", expected=former)
    for engine in (_files() / "model_engine").glob("*.yaml"):
        if entry == "ppo" and engine.stem in key.split("."):
            _, other = _by_hydra(entry, [f"model_engine={engine.stem}"])
            if other is not None and _has(other, key):
                remedy = f"add model_engine={engine.stem}"
                return ConfigError(what, where=where, found="a key of another engine", remedy=remedy)
    if _is_open(config, key):
        remedy = "+KEY adds a key that verl's own files do not have"
        return ConfigError(what, where=where, remedy=remedy)
    section, _, last = key.rpartition(".")
    known = [leaf for leaf, _ in _leaves(config, "")]
    near = [one for one in known if one.rpartition(".")[2] == last] if "." in key else []
    if not near:
        beside = [one for one in known if one.rpartition(".")[0] == section]
        near = difflib.get_close_matches(key, beside, n=2, cutoff=0.9)
    return ConfigError(
        what,
        where=where,
        expected=" or ".join(near) if 0 < len(near) < 3 else None,
        remedy="it is of another release or trainer of verl's; leave it out, or name the key that this one has",
    )


def _leaves(config: Any, above: str) -> Iterator[tuple[str, Any]]:
    from omegaconf import DictConfig

    for name in config.keys():  # noqa: SIM118
        node, dotted = config._get_node(name), f"{above}{name}"
        if (
            isinstance(node, DictConfig)
            and not node._is_none()
            and not node._is_interpolation()
            and len(node)
        ):
            yield from _leaves(node, f"{dotted}.")
        else:
            yield dotted, node


class _Budget:
    """Bounds what references expand to. They may multiply: what names another text or section twice doubles it."""

    def __init__(self) -> None:
        self.characters = _MOST_CHARACTERS

    def spend(self, value: Any) -> None:
        # omegaconf's `str` follows no reference.
        self.characters -= _PER_VALUE + len(str(value))
        # The same error as Python's own for a circle: both mean that the references do not end.
        if self.characters < 0:
            raise RecursionError

    @contextmanager
    def on_references(self) -> Iterator[None]:
        """Counts each reference that omegaconf follows: one text may hold thousands, and it gives their sum."""
        from omegaconf import base

        visitor: Any = base.GrammarVisitor
        spend = self.spend

        class Counted(visitor):  # type: ignore[misc]
            def visitConfigValue(self, ctx: Any) -> Any:  # noqa: N802 - ANTLR's name
                spend(ctx.getText())
                return super().visitConfigValue(ctx)

            def visitInterpolation(self, ctx: Any) -> Any:  # noqa: N802
                result = super().visitInterpolation(ctx)
                spend(result)
                return result

        base.GrammarVisitor = Counted
        try:
            yield
        finally:
            base.GrammarVisitor = visitor


def _plain(config: "DictConfig") -> dict[str, Any]:
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    budget, path = _Budget(), list[str]()

    def plain(node: Any) -> Any:
        if not isinstance(node, DictConfig | ListConfig):
            budget.spend(node)
            return node
        budget.spend("")
        values = {}
        for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
            path.append(str(key))
            try:
                # verl writes `???` where a user has to say something; until then there is no value.
                values[key] = None if OmegaConf.is_missing(node, key) else plain(node[key])
            except OmegaConfBaseException:
                if budget.characters < 0:
                    raise RecursionError from None
                # One that cannot be resolved here, such as a variable of the job's environment, stays as it is written.
                values[key] = node._get_node(key)._value()
            path.pop()
        return values if isinstance(node, DictConfig) else list(values.values())

    try:
        with _no_environment(), budget.on_references():
            return dict(plain(config))
    except RecursionError:
        raise ConfigError(
            "verl's settings refer to themselves, or grow too large",
            where=f"verl.{'.'.join(path[:8])}",
            found=f"references that expand to more than {_MOST_CHARACTERS >> 20} MiB of text",
            remedy="fix the ${...} in this setting, and in those that it names",
        ) from None


@contextmanager
def _no_environment() -> Iterator[None]:
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError
    from omegaconf.resolvers import oc

    def refuse(*_: object) -> NoReturn:
        raise InterpolationResolutionError("the environment is not asked")

    # The job's environment is another one, and a value of ours would stand in messages.
    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _quoted(value: Any) -> Any:
    from hydra.core.override_parser.types import Quote, QuotedString

    if isinstance(value, str):
        return QuotedString(value, Quote.single)
    if isinstance(value, Mapping):
        return {key: _quoted(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_quoted(item) for item in value]
    return value


def _refused(problem: str, where: str = "verl") -> ConfigError:
    return ConfigError(
        "verl does not take these settings", where=where, found=problem, remedy="correct that setting"
    )
