"""The decisions about a submission before anything is made. Pure."""

from pathlib import Path
from typing import Literal

import msgspec

from verl_slurm.config.schema import RunConfig

__all__ = ["Cluster", "SubmissionPlan"]

Cluster = Literal["slurm", "local"]


class SubmissionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions about one submission before anything is made."""

    config: RunConfig
    """Paths absolute; builtin: names already replaced, except in a dry run."""
    run_dir: Path
    cluster: Cluster
    new_run: bool
    begun: bool = False
    """The run has a checkpoint or rollouts; until then any of its keys may change."""
    resumes_from: str | None = None
    """Its newest committed checkpoint."""
    inputs: tuple[tuple[str, str], ...] = ()
    """Model, data and reward that the run takes; empty for a guest."""
    checked: tuple[str, ...] = ()
    """The items that were checked and found good."""
    notes: tuple[str, ...] = ()
    """Notes for the user, e.g. that the local executor was chosen."""
