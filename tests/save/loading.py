"""Checkpoints read by their directory, with a reader for each call."""

from pathlib import Path
from typing import Any

from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.runtime_state.format import RuntimeState
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.loader import WholeReader, read_runtime_state, read_tensors


def load_tensors(
    directory: Path, domains: Any, ranks: Collective, keys: Keyring | None = None, near: Path | None = None
) -> None:
    read_tensors(CheckpointReader(directory, keys), domains, ranks, near=near)


def read_whole(directory: Path, domain: str, names: Any = None, keys: Keyring | None = None) -> Any:
    return WholeReader(CheckpointReader(directory, keys), domain).read(names)


def load_runtime_state(
    directory: Path, rank: int, world_size: int, keys: Keyring | None = None
) -> RuntimeState:
    return read_runtime_state(CheckpointReader(directory, keys), rank, world_size)
