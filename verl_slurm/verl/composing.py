"""Composes verl's settings by Hydra, over the configuration files of the installed verl.

Hydra is installed wherever verl is. verl itself is not imported, which would load torch and Ray: its directory
`trainer/config` is found by name.

References between settings (`${data.train_files}`) are resolved. References to the environment (`${oc.env:NAME}`) stay
as written: the job's environment is another one, and its values do not belong into messages.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.packages import require_packages
from verl_slurm.verl.overrides import (
    OwnSettings,
    Setting,
    own_settings,
    require_possible,
    trainer_mode,
    user_settings,
)
from verl_slurm.verl.releases import Entry

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Composed", "checked_settings", "compose", "words_of"]

_CONFIG = {"ppo": "ppo_trainer", "sft": "sft_trainer_engine"}
_MOST_VALUES = 100_000
"""verl's own configuration has some 700."""


class Composed(msgspec.Struct, frozen=True):
    """verl's input.

    Attributes:
        words: overrides for Hydra, including those of the start.
        config: verl's whole configuration, an omegaconf.DictConfig.
        settings: the same as plain values; one that needs the environment is as it is written.
    """

    words: list[str]
    config: Any
    settings: dict[str, Any]


def checked_settings(
    entry: Entry, section: Mapping[str, Any], own: OwnSettings, *, recipe: bool = False
) -> Composed:
    """Composes the user's settings and those of a start, and refuses impossible ones. Takes a second, mostly for
    imports.

    Args:
        section: `RunConfig.verl`.
        recipe: for a recipe's own main, which may look at the mode, and names a trainer itself or by the mode.

    Raises:
        ConfigError: verl does not take a setting, or a run cannot.
    """
    said = user_settings(section)
    # The start's own settings come last: of two words for one key Hydra takes the later one.
    answer = composed(entry, [*said.values(), *own_settings(entry, own, said)])
    # On what comes out, not on the words: a reference or a group may set a key without naming it.
    require_possible(answer.settings, said)
    if entry == "ppo" and not recipe:  # our trainers are registered under names like verl's
        answer.words.append(f"trainer.v1.trainer_mode=verl_slurm_{trainer_mode(answer.settings)}")
    return answer


def composed(entry: Entry, settings: Iterable[Setting]) -> Composed:
    """Composes settings into verl's configuration.

    Raises:
        ConfigError: Hydra cannot parse a word, or verl does not take it.
    """
    words = words_of(settings)
    config = compose(entry, words)
    return Composed(words, config, _plain(config))


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
            raise _refused(error, f"verl.{setting.key}") from None
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
    """Returns verl's whole configuration.

    Raises:
        ConfigError: Hydra does not take a word, or verl has no such key.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    spec = find_spec("verl")
    (place, *_) = (spec.submodule_search_locations if spec else None) or [""]
    # Hydra's own settings are for `hydra.main`, not for the configuration.
    chosen = [word for word in words if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]
    try:
        # verl's files as they are installed, so that that release's own defaults count.
        with hydra.initialize_config_dir(str(Path(place) / "trainer" / "config"), version_base=None):
            return hydra.compose(_CONFIG[entry], overrides=chosen)
    except (HydraException, OmegaConfBaseException) as error:
        raise _refused(error, "verl") from error


def _plain(config: "DictConfig") -> dict[str, Any]:
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # References may multiply: a section that names another one twice doubles it.
    budget = iter(range(_MOST_VALUES))

    def plain(node: Any) -> Any:
        # The same error as Python's own for a circle: both mean that the references do not end.
        if next(budget, None) is None:
            raise RecursionError
        if not isinstance(node, DictConfig | ListConfig):
            return node
        values = {}
        for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
            try:
                # verl writes `???` where a user has to say something; until then there is no value.
                values[key] = None if OmegaConf.is_missing(node, key) else plain(node[key])
            except OmegaConfBaseException:
                # One that cannot be resolved here, such as a variable of the job's environment, stays as it is written.
                raw: Any = OmegaConf.to_container(node, resolve=False)
                values[key] = raw[key]
        return values if isinstance(node, DictConfig) else list(values.values())

    try:
        with _no_environment():
            return dict(plain(config))
    except RecursionError:
        raise ConfigError(
            "verl's settings refer to themselves, or grow too large",
            where="verl",
            remedy="fix the ${...} in them",
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


def _refused(error: Exception, where: str) -> ConfigError:
    return ConfigError(
        "verl does not take these settings",
        where=where,
        found=error,
        remedy="+KEY adds a key that verl's own files do not have",
    )
