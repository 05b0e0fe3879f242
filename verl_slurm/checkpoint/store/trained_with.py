"""Stores the configuration that a run last trained with; a new start's is compared with it (`config.changes`).

The lead writes it each time it starts ranks. `run.yaml` configures the next start, and the user may edit it. A run of a
former version has no such file; its newest checkpoint's config.yaml serves instead.
"""

from contextlib import suppress
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import CONFIG, TooMuch, read_regular
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.config.load import dump, parse_config
from verl_slurm.config.schema import RunConfig

__all__ = ["note_trained_with", "trained_with"]


def trained_with(
    paths: RunPaths, now: RunConfig, checkpoint: Path | None, keys: Keyring | None = None
) -> RunConfig | None:
    """Returns the configuration that the newest ranks were started with; None if it is not known.

    Args:
        now: of this start. A checkpoint that was taken over from another run says nothing about this one.
        checkpoint: the newest of the run.

    Raises:
        OSError: storage does not answer.
    """
    with suppress(
        VerlSlurmError, FileNotFoundError, TooMuch
    ):  # written by a version with other keys, or not written
        former = parse_config(read_regular(paths.trained_with, CONFIG), str(paths.trained_with))
        return msgspec.structs.replace(former, run_dir=now.run_dir)  # the directory may have been moved
    if checkpoint is None:
        return None
    with suppress(VerlSlurmError):
        reader = CheckpointReader(checkpoint, keys)
        former = parse_config(reader.read("config.yaml"), str(checkpoint / "config.yaml"))
        return former if former.run_dir == now.run_dir else None
    return None


def note_trained_with(paths: RunPaths, config: RunConfig) -> None:
    """Records that ranks are started with `config`."""
    data = dump(config)
    with suppress(FileNotFoundError, TooMuch):
        if read_regular(paths.trained_with, CONFIG) == data:
            return
    private_dir(paths.control)
    write_file(paths.trained_with, data)
