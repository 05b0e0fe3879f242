"""Resolves the relative paths of a configuration.

One rule holds for every key that names an input. A path written in the YAML is relative to the YAML's directory; a
path given on the command line is relative to the working directory. `run_dir`, an output, is always relative to the
working directory. An input that exists in the working directory and not beside the YAML is still taken, with a note;
one that exists in both places is refused.
"""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from verl_slurm.base.bounded import SMALL, TooMuch, read_regular
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.paths import CHECKPOINT_NAME, is_circle
from verl_slurm.config.reward_spec import parse_reward
from verl_slurm.config.schema import BUILTIN, HOOKS, RunConfig, ServiceConfig
from verl_slurm.program.programs import file_of_verl
from verl_slurm.verl.verl_inputs import input_keys

T = TypeVar("T", bound=msgspec.Struct)


def given_keys(overrides: Iterable[str], verl: Iterable[str] = ()) -> frozenset[str]:
    """Returns the dotted keys that words of the command line set."""
    own = {word.partition("=")[0] for word in overrides}
    return frozenset(own | {f"verl.{word.partition('=')[0].lstrip('+')}" for word in verl})


def expanded(key: str, text: str) -> Path:
    """Returns a path with `~` replaced. ConfigError: no home is known, or no path has such a character."""
    if "\0" in text:
        raise ConfigError("a null character in a path", where=key, found=text, remedy="write it without")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ConfigError(
            "no home directory is known for this user",
            where=key,
            found=text,
            remedy="write the path out; ./~NAME is a file of this name",
        )
    return Path(path)


def _input(key: str, path: Path) -> str:
    """Returns the absolute path of an input. ConfigError: links on it lead in a circle."""
    full = os.path.abspath(path)
    if is_circle(full):
        remedy = "ls -l shows where each leads"
        raise ConfigError("links that lead in a circle", where=key, found=full, remedy=remedy)
    return full


class Places:
    """Makes paths absolute by the rule above.

    Args:
        caller: the working directory of `submit`.
        source: the YAML file; None: all paths are relative to `caller`.
        given: keys of the command line, from `given_keys`.
    """

    def __init__(self, caller: Path, source: Path | None = None, given: frozenset[str] = frozenset()) -> None:
        self._caller = Path(os.path.abspath(caller))
        self._beside = self._caller if source is None else Path(os.path.abspath(source)).parent
        self.given = given
        self.notes: list[str] = []
        """Notes for the user about paths that were taken by the former rule."""

    def output(self, text: str) -> str:
        """Resolves `run_dir`."""
        return os.path.abspath(self._caller / expanded("run_dir", text))

    def run_beside(self, run_dir: str) -> str:
        """Returns the run that is beside the YAML, if this one is to be new because the caller is elsewhere."""
        there = os.path.abspath(self._beside / expanded("run_dir", run_dir))
        is_other = not self.is_given("run_dir") and there != self.output(run_dir)
        return there if is_other and os.path.lexists(os.path.join(there, "run.yaml")) else ""

    def path(self, key: str, text: str) -> str:
        """Returns the absolute path of an input. ConfigError: it means two files, or none can be reached by it."""
        return _input(key, self._base(key, text) / expanded(key, text))

    def beside(self, key: str) -> Path:
        """Returns the directory by which relative names under this key go."""
        return self._caller if self.is_given(key) else self._beside

    def base_of_reward(self, text: str) -> Path:
        """Returns the directory that a reward's file or model is relative to."""
        spec = parse_reward(text)
        named = spec is not None and (spec.kind == "classifier" or spec.is_file)
        return self._base("model.reward", spec.name) if spec is not None and named else self._caller

    def _base(self, key: str, text: str) -> Path:
        path = expanded(key, text)
        # Nothing to decide: what the path is joined with has no influence, or both directories are one.
        if path.is_absolute() or self.is_given(key) or self._beside == self._caller:
            return self._caller
        ours, theirs = self._beside / path, self._caller / path
        # lexists: a link that leads nowhere is there, and its error names the place that was meant.
        if not os.path.lexists(theirs) or not os.path.lexists(ours):
            # Also where neither exists: the error then names the place where the rule looks for it.
            if not os.path.lexists(theirs):
                return self._beside
            # Taken all the same: configurations written for the former rule, relative to the working directory, still
            # run.
            self.notes.append(
                f"{key}: {text} is not beside the YAML, and was found in the working directory; "
                f"write {os.path.abspath(theirs)}, or move it to {self._beside}"
            )
            return self._caller
        if os.path.realpath(ours) == os.path.realpath(theirs):
            return self._beside
        # A run must not start on other data than was meant, so neither is chosen.
        raise ConfigError(
            "a relative path that means two things",
            where=key,
            found=f"{os.path.abspath(ours)}, beside the YAML, and {os.path.abspath(theirs)}, in the working directory",
            expected="one of them",
            remedy="write it out as an absolute path",
        )

    def is_given(self, key: str) -> bool:
        """Returns whether the command line sets this key."""
        # A word may set a whole section, and with it each path in it.
        return any(key == given or key.startswith(f"{given}.") for given in self.given)


def value_of(config: RunConfig, key: str) -> Any:
    """Returns the value under a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_values(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """Returns the config with other values under dotted keys."""
    for key, value in values.items():
        config = _with(config, key.split("."), value)
    return config


def _with(holder: T, names: Sequence[str], value: object) -> T:
    first, *rest = names
    value = _with(getattr(holder, first), rest, value) if rest else value
    return msgspec.structs.replace(holder, **{first: value})


# Keys that name an input by one path, and the values of each that are none.
_INPUTS = {
    "model.path": f"{BUILTIN}.*",
    "data.root": f"{BUILTIN}.*",
    "data.eval_root": f"{BUILTIN}.*",
    "data.chat_template": "auto|none",
    "checkpoint.resume_from": f"auto|{CHECKPOINT_NAME.pattern}",
    "code.tree": "auto",
    "hooks.webhook_token_file": "",
}


def absolute(config: RunConfig, places: Places | Path) -> RunConfig:
    """Returns the config with every path made absolute, and the run's name put into `run_dir`; a directory as
    `places`: all paths are relative to it.

    `resume_from` may be a path; `auto`, the name of a checkpoint, `builtin:` and `rule:` stay. In a guest's command
    the first word is a path if it ends like one. In verl's words, data files and models that exist are paths.

    Raises:
        ConfigError: a path that means two files; or no Python environment of this name.
    """
    places = places if isinstance(places, Places) else Places(places)
    # An output: relative to the working directory, so that a shipped example does not write into the package.
    values: dict[str, object] = {"run_dir": places.output(config.run_dir.replace("{name}", config.name))}
    for key, no_path in _INPUTS.items():
        text = value_of(config, key)
        if text is not None and not re.fullmatch(no_path, text, re.DOTALL):
            values[key] = places.path(key, text)
    # A reward holds its path behind a prefix, so it has a rule of its own.
    values["model.reward"] = absolute_reward(config.model.reward, places.base_of_reward(config.model.reward))
    if config.trainer.command and config.trainer.command[0].endswith(".py"):
        values["trainer.command"] = _with_path(places, "trainer.command", config.trainer.command)
    for hook in HOOKS:
        argv = getattr(config.hooks, hook)
        # A word without a slash is looked for in PATH, as a shell does.
        if argv and "/" in argv[0]:
            values[f"hooks.{hook}"] = _with_path(places, f"hooks.{hook}", argv)
    values["verl"] = _absolute_of_verl(config, places)
    values["env_from_files"] = {
        name: places.path(f"env_from_files.{name}", text) for name, text in config.env_from_files.items()
    }
    values["services"] = {
        name: _absolute_service(f"services.{name}", service, places)
        for name, service in config.services.items()
    }
    if config.slurm.python is not None:
        values["slurm.python"] = find_python(config.slurm.python, places)
    if config.slurm.container is not None and config.slurm.container.is_file:
        key = "slurm.container.image"
        values[key] = places.path(key, config.slurm.container.image)
    return with_values(config, values)


def _with_path(places: Places, key: str, words: Sequence[str]) -> tuple[str, ...]:
    return (places.path(key, words[0]), *words[1:])


def _absolute_service(key: str, service: ServiceConfig, places: Places) -> ServiceConfig:
    command = service.command
    # A program without a slash is looked for in PATH on the node, as a shell does.
    if command[0].endswith(".py") or "/" in command[0]:
        command = _with_path(places, f"{key}.command", command)
    secrets = {
        variable: places.path(f"{key}.env_from_files.{variable}", text)
        for variable, text in service.env_from_files.items()
    }
    return msgspec.structs.replace(service, command=command, env_from_files=secrets)


def _absolute_of_verl(config: RunConfig, places: Places) -> dict[str, Any]:
    """Returns verl's words with existing relative paths of data, models and code made absolute."""
    if config.trainer.backend != "verl":
        return config.verl
    # A copy: the configuration that the user wrote is shown and kept as it is.
    # verl's workers run in another directory.
    words, keys = dict(config.verl), input_keys(config.trainer.entry)
    # Hydra's `+key` adds what verl's own configuration does not have; it names the same place.
    for name, value in config.verl.items():
        key = f"verl.{name.lstrip('+')}"
        if name.lstrip("+") not in keys:
            # A file of code or settings, such as `custom_reward_function.path`.
            if place := file_of_verl(value):
                words[name] = value.removesuffix(place) + _if_there(key, place, places)
        elif isinstance(value, list):
            words[name] = [_if_there(key, one, places) for one in value]
        else:
            words[name] = _if_there(key, value, places)
    return words


def _if_there(key: str, value: Any, places: Places) -> Any:
    if isinstance(value, str) and value.startswith("~"):
        expanded(key, value)  # verl would look for it in the hub
    # A `$` is a reference of Hydra's, and `[` begins a list in its grammar: neither is a path.
    relative = isinstance(value, str) and value and not value.startswith(("/", "~", "[")) and "$" not in value
    if not relative:
        return value
    found = places.path(key, value)
    # What does not exist may be a name of the Hugging Face hub.
    return found if os.path.exists(found) else value


def absolute_reward(text: str, base: Path) -> str:
    """Makes the path in `text`, if it has one, absolute against `base`. A text that is no reward stays as it is."""
    spec = parse_reward(text)
    if spec is None or not (spec.kind == "classifier" or spec.is_file):
        return text
    return str(spec._replace(name=_input("model.reward", base / expanded("model.reward", spec.name))))


def find_python(text: str, places: Places) -> str:
    """Returns the directory of `slurm.python`, an environment's or conda's of this name. ConfigError: none, or
    several.
    """
    if "/" not in text and not (here := Path(places.path("slurm.python", text))).is_dir():
        found = sorted({place for place in _conda_environments() if Path(place).name == text})
        if len(found) == 1:
            return found[0]
        known = ", ".join(sorted({Path(place).name for place in _conda_environments()}))
        raise ConfigError(
            "several conda environments have this name" if found else "no such Python environment",
            where=f"slurm.python={text}",
            found=", ".join(found) or f"neither {here} nor a conda environment of this name",
            expected=f"one of conda's: {known}" if known and not found else None,
            remedy="give the directory of the environment",
        )
    directory = places.path("slurm.python", text)
    # `source DIR/bin/activate` and `#!DIR/bin/python` are what people have at hand.
    for tail in ("/bin/activate", "/bin/python", "/bin/python3", "/bin"):
        directory = directory.removesuffix(tail)
    if not os.access(f"{directory}/bin/python", os.X_OK):
        raise ConfigError(
            "no such Python environment",
            where=f"slurm.python={text}",
            found=f"no program {directory}/bin/python",
            # What is there and is no environment is not to be filled with one.
            remedy="give the directory of an environment, which has bin/python"
            if os.path.lexists(directory)
            else f"{shlex.join([sys.executable, '-m', 'venv', directory])}, or give another directory",
        )
    return directory


def _conda_environments() -> list[str]:
    """Returns the directories that conda, mamba or micromamba have made, as they record them."""
    roots = [
        os.environ.get("MAMBA_ROOT_PREFIX", ""),
        str(Path(os.environ.get("CONDA_EXE", "/x/x")).parent.parent),
    ]
    homes = [Path(root) / "envs" for root in roots if root]
    homes += [Path(place) for place in os.environ.get("CONDA_ENVS_PATH", "").split(":") if place]
    found = [str(place) for home in homes if home.is_dir() for place in home.iterdir()]
    with contextlib.suppress(OSError, TooMuch):  # conda has made none
        listed = read_regular(Path.home() / ".conda" / "environments.txt", SMALL)
        found += os.fsdecode(listed).split("\n")
    return [place for place in found if place and (Path(place) / "conda-meta").is_dir()]
