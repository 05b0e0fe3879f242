"""Finds the keys of a checkpoint that is named by its path: those that its run is configured with."""

from pathlib import Path

from verl_slurm.base.errors import KeyRefused, PermissionRefused
from verl_slurm.base.keys import Keyring, load_keys, read_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import load_resolved

__all__ = ["keys_at_hand", "keys_for"]


def keys_for(place: Path, key_file: Path | None = None) -> Keyring | None:
    """Loads the keys for a run's directory, or for one of its checkpoints; None if it is configured with none.

    Args:
        key_file: use this key instead, whatever the run says.

    Raises:
        KeyRefused, PermissionRefused: `keys.load_keys`.
        ConfigError: the run's configuration does not load.
    """
    if key_file is not None:
        return Keyring(read_key_file(key_file))
    place = place.resolve()
    candidates = [place, place.parent.parent]
    if place.parent.parent.name == RunPaths(place).partial.root.name:
        candidates.append(place.parent.parent.parent)  # a partial save lies one level deeper
    for directory in candidates:
        run_yaml = RunPaths(directory).run_yaml
        if run_yaml.is_file():
            return load_keys(load_resolved(run_yaml).checkpoint.encryption)
    return None


def keys_at_hand(place: Path, key_file: Path | None = None) -> tuple[Keyring | None, str]:
    """Does the work of `keys_for` for commands that are useful without keys: returns (keys, why they are missing).

    A login node may well lack the key. The caller must then say what was not checked: the reason is never empty if a
    configured key could not be read.

    Raises:
        KeyRefused, PermissionRefused: `key_file` was named and is no key.
        ConfigError: the run's configuration does not load.
    """
    try:
        return keys_for(place, key_file), ""
    except (KeyRefused, PermissionRefused) as error:
        if key_file is not None:
            raise
        return None, f"{error.what}: {error.where}"
