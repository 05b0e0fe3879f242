"""Partial saves: which tensors one holds, and that nothing is ever resumed from it."""

from collections.abc import Sequence
from typing import Literal

from verl_slurm.checkpoint.format import Manifest
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.errors import ConfigError

__all__ = ["Components", "partial_domains", "require_full"]

Components = tuple[Literal["actor", "critic", "optimizer"], ...]
"""Tensor domains of a partial save, in the order of the format; empty: a full one."""


def partial_domains(config: CheckpointConfig) -> Components:
    """What a partial save holds, empty where none is configured.

    `optimizer` is one domain: with it goes the optimizer state of all that trains, of other components, too.

    Called by: trainer.loop.
    """
    wanted: Sequence[str] = config.components
    optimizer: Components = ("optimizer",) if wanted and config.include_optimizer else ()
    return tuple(domain for domain in ("actor", "critic") if domain in wanted) + optimizer


def require_full(manifest: Manifest, where: object) -> None:
    """Refuse to go on from a partial checkpoint.

    Raises:
        ConfigError: it is one.

    Called by: recover, trainer.resuming.
    """
    if manifest.components:
        raise ConfigError(
            "a partial checkpoint cannot be resumed from",
            where=where,
            found=f"{', '.join(manifest.components)} only",
            expected="a full checkpoint",
            remedy="set checkpoint.resume_from=auto, or name a full one (verl-slurm checkpoints)",
        )
