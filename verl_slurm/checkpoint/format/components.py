"""Tells what a checkpoint holds and which run may resume from it: partial saves, other models, other loops."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.checkpoint.format.specification import Guest, Manifest, guest_directory
from verl_slurm.config.elastic import from_weights
from verl_slurm.config.roles import trained_roles
from verl_slurm.config.schema import CheckpointConfig, RunConfig

Components = tuple[Literal["actor", "critic", "optimizer"], ...]
"""Tensor domains of a partial save, in the order of the format; empty: a full one."""


_GUEST_OF: dict[str, Guest | None] = {"native": None, "verl": "verl", "command": "loop", "ray": "loop"}


def partial_domains(config: CheckpointConfig) -> Components:
    """Lists what a partial save holds; empty if none is configured."""
    wanted: Sequence[str] = config.components
    # One domain for all models: AdamW's state of a component that is left out goes along.
    optimizer: Components = ("optimizer",) if wanted and config.include_optimizer else ()
    # In the format's order, however the user listed them.
    return tuple(domain for domain in ("actor", "critic") if domain in wanted) + optimizer


def require_same_models(manifest: Manifest, config: RunConfig, where: object) -> None:
    """Refuses to resume from another algorithm or kind of loop than `config` has: ConfigError."""
    saved = None if isinstance(manifest.guest, msgspec.UnsetType) else manifest.guest
    # First: models are compared where the loop is ours, and a guest's manifest names none.
    if saved != _GUEST_OF[config.trainer.backend]:
        raise ConfigError(
            "the checkpoint is of another kind of loop",
            where=where,
            found=f"trainer.backend={config.trainer.backend}",
            expected=f"trainer.backend={next(b for b, guest in _GUEST_OF.items() if guest == saved)}",
            remedy="go on with the trainer.backend that wrote it, or start with checkpoint.resume_from=null",
        )
    # A guest's loop knows its own models.
    if saved is not None:
        return
    trained = trained_roles(config.train)
    former = "?" if isinstance(manifest.algorithm, msgspec.UnsetType) else manifest.algorithm
    # PPO's critic cannot be created from nothing, nor simply be dropped.
    if (former, manifest.roles) != (config.train.algorithm, trained):
        raise ConfigError(
            "the checkpoint is of another algorithm",
            where=where,
            found=f"train.algorithm={config.train.algorithm}, which trains {' and '.join(trained)}",
            expected=f"train.algorithm={former}: the checkpoint holds {' and '.join(manifest.roles)}",
            remedy=f"resume with that algorithm; or start a new run {from_weights(where)}",
        )


def require_full(manifest: Manifest, where: object) -> None:
    """Refuses to resume from a partial checkpoint: ConfigError."""
    # Empty means full.
    if manifest.components:
        raise ConfigError(
            "a partial checkpoint cannot be resumed from",
            where=where,
            found=f"{', '.join(manifest.components)} only",
            expected="a full checkpoint",
            remedy="set checkpoint.resume_from=auto, or name a full one (verl-slurm list RUN)",
        )


def require_own(manifest: Manifest, directory: Path) -> None:
    """Refuses a checkpoint that a guest saved: ConfigError."""
    if isinstance(manifest.guest, msgspec.UnsetType):
        return
    # Its content has the format of that loop already.
    own = directory / guest_directory(manifest.guest, manifest.step)
    tool = "`python -m verl.model_merger`" if manifest.guest == "verl" else "`torch.load`"
    if manifest.domains:
        tool = "`verl_slurm.save.ranks.loader.read_whole`"
    raise ConfigError(
        "the checkpoint is of a loop that is not ours",
        where=directory,
        found=f"the files of a {manifest.guest} loop",
        expected="a checkpoint of trainer.backend: native",
        remedy=f"its own files are in {own}; {tool} reads them",
    )
