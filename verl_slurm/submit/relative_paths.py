"""Resolves the relative paths of a configuration.

One rule holds for every key that names an input. A path written in the YAML is relative to the YAML's directory; a
path given on the command line is relative to the working directory. `run_dir`, an output, is always relative to the
working directory: a shipped example must not write into the installed package.

Up to d841de5 every path was relative to the working directory. So a path that exists there, and not beside the YAML,
is still taken, with a note. One that exists in both places is refused: a run must not start on other data than was
meant.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.reward_spec import parse_reward


def given_keys(overrides: Iterable[str], verl: Iterable[str] = ()) -> frozenset[str]:
    """Returns the dotted keys that words of the command line set."""
    own = {word.partition("=")[0] for word in overrides}
    return frozenset(own | {f"verl.{word.partition('=')[0].lstrip('+')}" for word in verl})


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
        return os.path.abspath(self._caller / Path(text).expanduser())

    def run_beside(self, run_dir: str) -> str:
        """Returns the run that is beside the YAML, if this one is to be new because the caller is elsewhere."""
        there = os.path.abspath(self._beside / Path(run_dir).expanduser())
        is_other = not self._is_given("run_dir") and there != self.output(run_dir)
        return there if is_other and os.path.lexists(os.path.join(there, "run.yaml")) else ""

    def path(self, key: str, text: str) -> str:
        """Returns the absolute path of an input.

        Raises:
            ConfigError: it exists beside the YAML and in the working directory, and the two are not the same.
        """
        return os.path.abspath(self._base(key, text) / Path(text).expanduser())

    def base_of_reward(self, text: str) -> Path:
        """Returns the directory that a reward's file or model is relative to."""
        spec = parse_reward(text)
        named = spec is not None and (spec.kind == "classifier" or spec.is_file)
        return self._base("model.reward", spec.name) if spec is not None and named else self._caller

    def _base(self, key: str, text: str) -> Path:
        path = Path(text).expanduser()
        # Nothing to decide: what the path is joined with has no influence, or both directories are one.
        if path.is_absolute() or self._is_given(key) or self._beside == self._caller:
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

    def _is_given(self, key: str) -> bool:
        # A word may set a whole section, and with it each path in it.
        return any(key == given or key.startswith(f"{given}.") for given in self.given)
