"""Opens the tiers of a run: their storages, and the lock that keeps movers apart."""

import fcntl
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

from verl_slurm.base.errors import ConfigError, TierError, VerlSlurmError
from verl_slurm.base.files import private_dir
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.packages import install_command
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import RUN_ID, run_id
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.config.checks.tiers import is_s3
from verl_slurm.config.schema import RunConfig, TierConfig
from verl_slurm.tiers.backend import Backend
from verl_slurm.tiers.census import OpenTier
from verl_slurm.tiers.tier_layout import run_prefix

ENTRY_POINTS = "verl_slurm.tiers"


def open_backend(tier: TierConfig) -> Backend:
    """Returns the storage of `tier`. Does not connect yet.

    Raises:
        ConfigError: its plug-in, or boto3, is not installed.
    """
    if tier.kind.startswith("plugin:"):
        name = tier.kind.partition(":")[2]
        found = list(entry_points(group=ENTRY_POINTS, name=name))
        if len(found) != 1:
            known = sorted(entry_points(group=ENTRY_POINTS).names)
            raise ConfigError(
                "no such tier plug-in" if not found else "two tier plug-ins of that name",
                where=f"tiers: {tier.name}",
                found=name,
                expected=", ".join(known) or f"an installed package with an entry point in {ENTRY_POINTS}",
                remedy="install the plug-in's package where the daemon runs",
            )
        make = found[0].load()
        backend: Backend = make(tier)
        return backend
    if is_s3(tier):
        # boto3 is an extra: without a bucket it is not imported.
        from verl_slurm.tiers.s3 import S3Backend

        return S3Backend(tier)
    from verl_slurm.tiers.posix import PosixBackend

    return PosixBackend(tier)


def open_tiers(paths: RunPaths, config: RunConfig) -> list[OpenTier]:
    """Opens the configured tiers, nearest first. One that cannot be opened is included, with the reason."""
    # Before `run_id`, which makes the file: a run without tiers needs none.
    if not config.tiers:
        return []
    number = run_id(paths)
    tiers = []
    for tier in config.tiers:
        run = run_prefix(tier.prefix, config.name, number)
        try:
            tiers.append(OpenTier(config=tier, run=run, backend=open_backend(tier)))
        # Listed with its problem: what it holds counts as unknown, not as gone.
        except VerlSlurmError as error:
            tiers.append(OpenTier(config=tier, run=run, backend=None, problem=error.one_line()))
        except ImportError as error:
            problem = f"{error.name} is not installed: {install_command('s3')}"
            tiers.append(OpenTier(config=tier, run=run, backend=None, problem=problem))
    return tiers


def namesakes(config: RunConfig) -> dict[str, Path]:
    """Returns the newest whole checkpoint that another run of the same name has in each tier that is a
    directory, by the tier's name: one whose RUN and id are gone, as far as the run that begins can know.
    """
    found = {}
    for tier in config.tiers:
        if tier.path is None:
            continue
        runs = Path(tier.path, tier.prefix).glob(f"{glob.escape(config.name)}-*")
        steps = [
            (order, step.parent)
            for run in runs
            if RUN_ID.fullmatch(run.name.removeprefix(f"{config.name}-"))
            for step in run.glob("step_*/manifest.json")
            if (order := checkpoint_order(step.parent.name)) is not None
        ]
        if steps:
            found[tier.name] = max(steps)[1]
    return found


@contextmanager
def mover_lock(paths: RunPaths) -> Iterator[None]:
    """Ensures one mover per run, by a lock of the kernel: it ends with its process, however that ends.

    Raises:
        TierError: another mover of this run is at work.
    """
    private_dir(paths.control)
    # O_CLOEXEC: a child that inherited the descriptor would hold the lock after our end.
    fd = os.open(paths.tier_lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            # It saves work, and safety does not rest on it: if a file system does not share locks between nodes, two
            # movers write the same bytes under the same keys.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TierError(
                "another mover of this run is at work",
                where=paths.tier_lock,
                remedy=f"wait for it; verl-slurm tiers {shell_word(paths.root)}",
            ) from None
        except OSError:
            pass  # a file system without locks, as Lustre without `-o flock`
        yield
    finally:
        # The file stays: removing it would let two movers lock two files of one name.
        os.close(fd)
