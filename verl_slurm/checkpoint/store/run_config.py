"""Finds what the run of a checkpoint is configured with: its keys, and the configuration that it last trained with.

A new start's configuration is compared with the last one (`config.changes`). The lead writes that each time it starts
ranks, because the user may edit `run.yaml`, which configures the next start. Where that
file is missing, the newest checkpoint's config.yaml serves instead.
"""

from contextlib import suppress
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import CONFIG, TooMuch, read_regular
from verl_slurm.base.errors import KeyRefused, PermissionRefused, VerlSlurmError
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.keys import Keyring, load_keys, read_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.config.load import dump, load_resolved, parse_config
from verl_slurm.config.schema import RunConfig


def keys_for(place: Path, key_file: Path | None = None) -> Keyring | None:
    """Loads the keys for a run's directory, or for one of its checkpoints; None if it is configured with none.

    Raises:
        KeyRefused, PermissionRefused: `keys.load_keys`.
        ConfigError: the run's configuration does not load.
    """
    if key_file is not None:
        # Whatever the run says: a run that was handed over may name a key file that is not on this machine.
        return Keyring(read_key_file(key_file))
    # `latest` and other links lead to a checkpoint whose run is to be found.
    place = place.resolve()
    # A run's directory, or RUN/checkpoints/step_x.
    candidates = [place, place.parent.parent]
    if place.parent.parent.name == RunPaths(place).partial.root.name:
        candidates.append(place.parent.parent.parent)  # a partial save lies one level deeper
    for directory in candidates:
        run_yaml = RunPaths(directory).run_yaml
        if run_yaml.is_file():
            return load_keys(load_resolved(run_yaml).checkpoint.encryption)
    return None


def keys_at_hand(place: Path, key_file: Path | None = None) -> tuple[Keyring | None, str]:
    """Returns (keys, why they are missing), for commands that are useful without keys.

    The reason is never empty if a configured key could not be read; the caller says what was not checked.
    A bad `key_file`, which the user named, raises as in `keys_for`.
    """
    try:
        return keys_for(place, key_file), ""
    except (KeyRefused, PermissionRefused) as error:
        # The run's key may well not be on a login node.
        if key_file is not None:
            raise
        return None, f"{error.what}: {error.where}"


def trained_with(
    paths: RunPaths, now: RunConfig, checkpoint: Path | None, keys: Keyring | None = None
) -> RunConfig | None:
    """Returns the configuration that the newest ranks were started with; None if it is not known.

    `checkpoint`: the newest of the run, asked where no record tells. OSError: storage does not answer.
    """
    with suppress(
        VerlSlurmError, FileNotFoundError, TooMuch
    ):  # written by a version with other keys, or not written
        former = parse_config(read_regular(paths.trained_with, CONFIG), str(paths.trained_with))
        return msgspec.structs.replace(former, run_dir=now.run_dir)  # the directory may have been moved
    if checkpoint is None:
        return None
    # Not known is an answer: the caller then compares with nothing.
    with suppress(VerlSlurmError):
        reader = CheckpointReader(checkpoint, keys)
        former = parse_config(reader.read("config.yaml"), str(checkpoint / "config.yaml"))
        # A checkpoint that was taken over from another run has that run's configuration.
        return former if former.run_dir == now.run_dir else None
    return None


def note_trained_with(paths: RunPaths, config: RunConfig) -> None:
    """Records that ranks are started with `config`."""
    data = dump(config)
    with suppress(FileNotFoundError, TooMuch):
        # The same as last time: no write and no fsync at most restarts.
        if read_regular(paths.trained_with, CONFIG) == data:
            return
    private_dir(paths.control, inside=paths.run)
    write_file(paths.trained_with, data)
