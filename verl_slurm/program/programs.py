"""Finds the user's programs in a configuration, and puts their copies in their places for the ranks.

A program is a file that the run executes or reads as code: of `trainer.command`, of `model.reward`, of the command of
a service, and of verl's settings each file that ends with .py, .yaml or .yml, such as `custom_reward_function.path`.
A module (`-m MODULE`, `python:MODULE:FUNCTION`) is one as well, unless it is part of an installed package.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import verl_slurm
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.reward_spec import parse_reward
from verl_slurm.config.schema import RunConfig
from verl_slurm.program.code_record import CodeRecord, read_record

_OF_VERL = (".py", ".yaml", ".yml")
_FILE_URL = "file://"
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = Path(verl_slurm.__file__).resolve().parents[1]


class Program(NamedTuple):
    """One program of the configuration."""

    key: str
    path: Path
    """Absolute, as the configuration has it."""
    alone: bool = False
    """Nothing beside it can be imported: it is copied by itself where no work tree holds it."""


def programs_of(config: RunConfig, search: Sequence[str] = ()) -> list[Program]:
    """Returns the programs that exist, of a configuration with absolute paths. `search`: the directories in which the
    ranks' Python looks for modules.
    """
    found = []
    trainer, reward = config.trainer, parse_reward(config.model.reward)
    if module := module_of(config):
        found += _module("trainer.command" if trainer.command else "model.reward", module, search)
    elif trainer.command:
        found.append(Program("trainer.command", Path(trainer.command[0])))
    elif trainer.backend == "native" and reward is not None and reward.is_file:
        found.append(Program("model.reward", Path(reward.name), alone=True))
    if trainer.backend == "verl":
        found += [
            Program(f"verl.{name}", Path(place), alone=True)
            for name, value in config.verl.items()
            if (place := file_of_verl(value)) and place.startswith("/")
        ]
    found += [
        Program(f"services.{name}.command", Path(service.command[0]))
        for name, service in config.services.items()
        if service.command[0].startswith("/") and service.command[0].endswith(".py")
    ]
    return [program for program in found if program.path.is_file()]


def module_of(config: RunConfig) -> str:
    """Returns the module that is the run's program; empty: it is a file, or there is none."""
    trainer, reward = config.trainer, parse_reward(config.model.reward)
    if trainer.command[:1] == ("-m",):
        return "".join(trainer.command[1:2])
    named = trainer.backend == "native" and reward is not None and reward.kind == "python"
    return reward.name if reward is not None and named and not reward.is_file else ""


def file_of_verl(value: Any) -> str:
    """Returns the file that a setting of verl names, if it is one of code or settings; else nothing."""
    # A `$` is a reference of Hydra's.
    named = isinstance(value, str) and value.endswith(_OF_VERL) and "$" not in value
    return value.removeprefix(_FILE_URL) if named else ""


def _module(key: str, name: str, search: Sequence[str]) -> list[Program]:
    # By names of files: an import would run the packages that contain the module.
    inner = name.replace(".", "/")
    for place in search:
        for tail in (f"{inner}.py", f"{inner}/__main__.py", f"{inner}/__init__.py"):
            path = Path(place, tail)
            if path.is_file():
                installed = _INSTALLED & set(path.parts) or path.is_relative_to(os.path.dirname(os.__file__))
                return [] if installed else [Program(key, path)]
    return []


def is_ours(place: str) -> bool:
    """Returns whether a directory is the one from which this package is imported, or below it."""
    # No copy takes its place: ranks and daemon have to be of one version, also after an upgrade between two attempts.
    return Path(place).resolve().is_relative_to(_OURS)


class Moves:
    """Maps places in the user's trees to their copies. Without a record nothing was copied."""

    def __init__(self, paths: RunPaths, record: CodeRecord | None) -> None:
        self._code, self._record = paths.code, record or CodeRecord()

    @classmethod
    def of(cls, paths: RunPaths) -> "Moves":
        """Raises `DataError` or OSError, as `read_record`."""
        return cls(paths, read_record(paths))

    def config(self, config: RunConfig) -> RunConfig:
        """Returns the configuration with the copies of its programs."""
        trainer, replace = config.trainer, msgspec.structs.replace
        if trainer.command:
            trainer = replace(trainer, command=(self._file(trainer.command[0]), *trainer.command[1:]))
        model = replace(config.model, reward=self._reward(config.model.reward))
        services = {
            name: replace(one, command=(self._file(one.command[0]), *one.command[1:]))
            for name, one in config.services.items()
        }
        return replace(config, trainer=trainer, model=model, services=services, verl=self._verl(config.verl))

    def search_path(self, inherited: str) -> str:
        """Returns PYTHONPATH with copies in the places of trees, and then those of what an editable install adds."""
        places = [place for place in inherited.split(os.pathsep) if place]
        kept = [place if is_ours(place) else self.folder(place) or place for place in places]
        added = [copy for place in self._record.search if (copy := self.folder(place))]
        return os.pathsep.join(dict.fromkeys([*kept, *added]))

    def folder(self, place: str) -> str | None:
        """Returns the copy of a directory; None: it has none."""
        for path in dict.fromkeys((os.path.normpath(place), os.path.realpath(place))):
            for tree in self._record.trees:
                if Path(path).is_relative_to(tree.root):
                    copy = self._code / tree.digest / os.path.relpath(path, tree.root)
                    return os.path.normpath(copy) if copy.is_dir() else None
        return None

    def working_directory(self, *, copied: bool) -> str | None:
        """Returns where the run's programs work in each attempt; `copied`: in the copy, if there is one.

        None: where the job is, since the directory is gone, or an older record does not name it.
        """
        place = self._record.directory
        copy = self.folder(place or os.getcwd()) if copied else None
        return copy or (place if os.path.isdir(place) else None)

    def lost_directory(self, config: RunConfig) -> str:
        """Returns what a user has to know of a working directory that is gone; empty: nothing."""
        # The trainer reads nothing by a relative name, and an image has a directory of its own.
        if config.slurm.container is not None or not (config.trainer.is_guest or config.services):
            return ""
        # Services work in the directory itself.
        copied = bool(config.trainer.command) and not config.services
        if not self._record.directory or self.working_directory(copied=copied) is not None:
            return ""
        gone = f"{self._record.directory}, where the program works, is not here"
        return f"{gone}: relative names go by the job's directory"

    def as_submitted(self, text: str) -> str:
        """Returns a message with the user's own places for those of their copies: these are the files to correct."""
        for tree in self._record.trees:
            text = text.replace(str(self._code / tree.digest), tree.root)
        return text

    def _file(self, path: str) -> str:
        # By the record and not by the path: a link on the way may lead elsewhere by now.
        copy = self._record.programs.get(path)
        return path if copy is None else str(self._code / copy)

    def _reward(self, reward: str) -> str:
        spec = parse_reward(reward)
        return reward if spec is None or not spec.is_file else str(spec._replace(name=self._file(spec.name)))

    def _verl(self, words: Mapping[str, Any]) -> dict[str, Any]:
        moved = dict(words)
        for name, value in words.items():
            if place := file_of_verl(value):
                moved[name] = value.removesuffix(place) + self._file(place)
        return moved
