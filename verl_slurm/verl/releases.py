"""Lists the releases of verl that were run under verl-slurm, judges the others, and finds the installed one.

Only running a release shows that a run under it is right, and this is the list. verl itself is not imported, neither by
submit nor at a start.
"""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path
from typing import Literal

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.packages import pip_install

Entry = Literal["sft", "ppo"]

RELEASES = ("0.9.1", "0.9.0")
"""Those that were run, newest first: tests/verl and tests/slurm_cluster, with that release in the environment."""

_OLDEST = (0, 9)
"""Older ones have no PPO trainer that can be asked to save and leave (trainer.use_v1)."""
_VERSION = re.compile(r"(\d+)\.(\d+)")


def require_usable(version: str | None) -> str:
    """Returns what a user has to know about the installed release: that it was never tried; else an empty text.

    Raises:
        ConfigError: there is none, or one that is too old.
    """
    pip = pip_install(f"verl=={RELEASES[0]}")
    if version is None:
        raise ConfigError(
            "verl is not installed in this Python",
            where=sys.executable,
            expected="the package verl, in the Python that submits and in that of the job",
            remedy=f"{pip}, or submit from the environment that has it",
        )
    if version in RELEASES:
        return ""
    match = _VERSION.match(version)
    # A version that is no number, such as a checkout's, is not called too old: it is unknown.
    if match and (int(match[1]), int(match[2])) < _OLDEST:
        raise ConfigError(
            "this release of verl cannot be run under verl-slurm",
            where="verl",
            found=version,
            expected=f"{'.'.join(map(str, _OLDEST))} or newer",
            remedy=pip,
        )
    return f"verl {version} was never run under verl-slurm; these were: {', '.join(RELEASES)}"


def installed_verl() -> str | None:
    """Returns the version of verl in this Python, which is the job's; None: there is none. verl is not imported."""
    try:
        return importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        pass
    # A checkout has no distribution's metadata. submit and every start ask here, so that they give the same answer.
    spec = importlib.util.find_spec("verl")  # a checkout on PYTHONPATH
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        try:
            return (Path(place) / "version" / "version").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
    return None
