"""Finds the verl installed in this Python without importing it, for submit beforehand and for each start."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from verl_slurm.base.errors import ConfigError
from verl_slurm.verl.releases import RELEASES, Entry, Release, require_usable

__all__ = ["installed_verl", "require_installed"]


def installed_verl() -> str | None:
    """Returns the version of verl in this Python, which is the job's; None: there is none. verl is not imported."""
    try:
        return importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        pass
    spec = importlib.util.find_spec("verl")  # a checkout on PYTHONPATH
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        try:
            return (Path(place) / "version" / "version").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
    return None


def require_installed(entry: Entry, version: str | None) -> Release:
    """Returns the known facts of the installed release.

    Args:
        version: `installed_verl()`.

    Raises:
        ConfigError: there is none, or one that cannot be served.
    """
    if version is None:
        pip = f"{sys.executable} -m pip install verl=={next(iter(RELEASES))}"
        raise ConfigError(
            "verl is not installed in the Python that the job runs",
            where=sys.executable,
            expected="the package verl",
            remedy=f"{pip}, or submit from the environment that has it",
        )
    return require_usable(version, entry)
