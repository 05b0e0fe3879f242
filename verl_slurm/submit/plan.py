"""What is decided of a submission before anything is made. Pure."""

from pathlib import Path
from typing import Literal

import msgspec

from verl_slurm.config.schema import RunConfig

__all__ = ["Cluster", "SubmissionPlan"]

Cluster = Literal["slurm", "local"]


class SubmissionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that is decided before anything is made."""

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
    """What was looked at and found good."""
    notes: tuple[str, ...] = ()
    """What the user should know, e.g. that the local executor was chosen."""
